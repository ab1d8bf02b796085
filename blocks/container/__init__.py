"""The provider `container`."""
