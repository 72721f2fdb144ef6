-- Constraints on the columns of the models that hold for new rows and were not looked at for those that were there,
-- with the SQL that does, while reading and writing go on.
select
    con.conname,
    format('alter table rag.rag_chunks validate constraint %%I', con.conname) as statement
from pg_constraint as con
where con.conrelid = cast('rag.rag_chunks' as regclass)
    and con.conname in ('rag_chunks_second_embedding', 'rag_chunks_embedding_there')
    and not con.convalidated
order by con.conname
