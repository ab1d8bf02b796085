"""What a sweep tries next: the search space, samplers and pruners, and the record from which a search goes on."""
