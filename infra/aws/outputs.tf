output "store" {
  description = "The --store of a launch."
  value       = "s3://${var.bucket}/${var.prefix}"
}

output "node_role" {
  description = "The --node-role of a launch."
  value       = aws_iam_instance_profile.node.name
}
