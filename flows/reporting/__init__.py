"""Reports on flow runs, from their outcomes or their ledgers: summaries, tables, charts, pages and exports."""
