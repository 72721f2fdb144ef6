-- Empties the search path for the rest of the transaction, so that the catalog writes every name in full.
select set_config('search_path', '', true)
