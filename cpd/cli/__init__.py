"""The `cpd` command, one file a subcommand. Each subcommand imports what it needs when it is used."""
