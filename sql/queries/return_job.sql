-- Gives a job back that came to nothing, to be tried again or for good, as rag_worker; false when it was not its own.
-- id, claim: uuid; reason, detail, proof: text; due_in: interval, null for good; counted: whether it was an attempt
select
    rag.return_job(
        id => %(id)s,
        claim => %(claim)s,
        reason => %(reason)s,
        detail => %(detail)s,
        due_in => %(due_in)s,
        counted => %(counted)s,
        proof => %(proof)s
    ) as returned
