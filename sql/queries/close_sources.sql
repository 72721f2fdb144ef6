-- Retracts sources and provenances, each in a class, so that no ingest brings them back; the highest generation.
-- access_ids: bigint[]; source_ids, provenance_ids: text[], one of them null in each place; document_ids: uuid[] with
-- nulls, all of one length; cascade_id: text
select rag.close_sources(
    access_ids => %(access_ids)s,
    source_ids => %(source_ids)s,
    provenance_ids => %(provenance_ids)s,
    document_ids => %(document_ids)s,
    cascade_id => %(cascade_id)s
) as generation
