"""The provider `modal`."""
