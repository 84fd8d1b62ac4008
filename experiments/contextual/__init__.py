"""What the commands on contextual representations share."""
