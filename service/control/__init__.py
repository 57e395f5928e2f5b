"""Control of one robot: from observations and chunks to one command per tick."""
