"""Units, errors, dtypes and configuration: what every other room may use."""
