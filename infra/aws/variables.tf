variable "region" {
  description = "Where the bucket is; a launch in the same region pays nothing for traffic to it."
  type        = string
  default     = "us-east-1"
}

variable "bucket" {
  description = "Name of the bucket, unique in all of S3."
  type        = string
}

variable "prefix" {
  description = "What nodes may reach in the bucket; part of the store's URL."
  type        = string
  default     = "art-sky"
  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._/-]*[A-Za-z0-9]$", var.prefix))
    error_message = "Letters, digits, '.', '_', '-' and '/', beginning and ending with a letter or digit."
  }
}

variable "role" {
  description = "Name of the role and instance profile of nodes."
  type        = string
  default     = "art-sky-node"
}
