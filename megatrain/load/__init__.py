"""Where weights come from: shards of a checkpoint, or seeded initialisation, a layer at a time."""
