-- Declares the active model, and a second one that is to be filled; as rag_owner.
-- active, coming: text; dimensions: integer
select rag.add_model(%(active)s, %(coming)s, %(dimensions)s) as added
