-- Sets the session variables of a transaction as somebody with the service's password could, for the canary of
-- `rag doctor`: begin_as() would refuse a second principal. '' in all of them is nobody.
-- Compiling what is estimated to be expensive would take longer than running it.
-- tenant_id, user_id, project_id, tags (a JSON array), signature: text
select
    set_config('jit', 'off', true),
    set_config('app.tenant_id', %(tenant_id)s, true),
    set_config('app.user_id', %(user_id)s, true),
    set_config('app.project_id', %(project_id)s, true),
    set_config('app.tags', %(tags)s, true),
    set_config('app.signature', %(signature)s, true)
