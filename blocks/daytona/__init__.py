"""The provider `daytona`."""
