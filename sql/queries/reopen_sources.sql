-- Lets what was retracted be ingested again; how many sources and provenances, each counted in each class.
-- source_ids, provenance_ids, cascade_ids: text[]; document_ids: uuid[]; scopes: text[] within which it may
select rag.reopen_sources(
    source_ids => %(source_ids)s,
    provenance_ids => %(provenance_ids)s,
    document_ids => %(document_ids)s,
    cascade_ids => %(cascade_ids)s,
    scopes => %(scopes)s
) as opened
