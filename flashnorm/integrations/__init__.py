"""Using flashnorm inside other libraries. Each module imports its library only where it needs it."""
