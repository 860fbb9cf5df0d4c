"""Shows what training sees and what sharing would save, before anything is trained: `inspect` and `report`."""
