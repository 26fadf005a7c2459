# An AMI of a GPU node; infra/README.md says how it is built and used.

packer {
  required_version = ">= 1.9"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.3, < 2"
    }
  }
}

variable "wheel" {
  description = "The wheel of art-sky that the launches will come from: pip wheel --no-deps --wheel-dir dist ."
  type        = string
}

variable "source_ami" {
  description = "What SkyPilot would start by itself in `region`: Ubuntu with NVIDIA's driver, reached as `ubuntu`."
  type        = string
}

variable "region" {
  description = "Where it is built."
  type        = string
  default     = "us-east-1"
}

variable "regions" {
  description = "Further regions that get a copy; an AMI can be launched in its own region only."
  type        = list(string)
  default     = []
}

variable "model" {
  description = "Base model whose weights the image holds, as a launch names it; none by default."
  type        = string
  default     = ""
}

variable "hf_token" {
  description = "Key to a gated model; used while it is downloaded and left nowhere."
  type        = string
  default     = ""
  sensitive   = true
}

variable "instance_type" {
  description = "Of the machine that builds; nothing there needs a GPU."
  type        = string
  default     = "m6i.2xlarge"
}

variable "disk_gib" {
  description = "Size of the image; --disk of a launch may not be smaller."
  type        = number
  default     = 80
}

locals {
  folder    = "/tmp/art-sky-image"
  options   = var.model == "" ? "" : "--model '${var.model}'"
  provision = "bash {{ .Path }} ${local.folder}/${basename(var.wheel)} ${local.options}"
}

source "amazon-ebs" "node" {
  region        = var.region
  ami_regions   = var.regions
  source_ami    = var.source_ami
  instance_type = var.instance_type
  ssh_username  = "ubuntu"

  ami_name        = "art-sky-node-${formatdate("YYYYMMDD-hhmmss", timestamp())}"
  ami_description = "art-sky node, made with ${basename(var.wheel)}"
  tags            = { art-sky-wheel = basename(var.wheel) }

  # The machine that builds ends its own bill, also when nobody waits for it any more.
  user_data                             = "#!/bin/sh\nshutdown -h +120\n"
  shutdown_behavior                     = "terminate"
  run_tags                              = { Name = "art-sky-image" }
  temporary_key_pair_type               = "ed25519"
  ssh_clear_authorized_keys             = true
  temporary_security_group_source_public_ip = true

  metadata_options {
    http_endpoint = "enabled"
    http_tokens   = "required"
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = var.disk_gib
    volume_type           = "gp3"
    delete_on_termination = true
  }
}

build {
  sources = ["source.amazon-ebs.node"]

  provisioner "shell" {
    inline = ["mkdir -p ${local.folder}"]
  }

  provisioner "file" {
    source      = var.wheel
    destination = "${local.folder}/"
  }

  provisioner "shell" {
    script           = "${path.root}/provision.sh"
    environment_vars = ["HF_TOKEN=${var.hf_token}"]
    # A file, so that the key is in no process list there.
    use_env_var_file = true
    execute_command  = ". {{ .EnvVarFile }} && ${local.provision}"
  }

  provisioner "shell" {
    script = "${path.root}/clean.sh"
  }

  # Which AMI in which region, as --image-id takes them.
  post-processor "manifest" {
    output = "image.json"
  }
}
