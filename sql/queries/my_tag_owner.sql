-- Who owns a tag that the principal holds, in the principal's tenant; no row when nobody does.
-- tag: text
select
    owner.owner_user_id,
    owner.owner_email
from rag.my_tag_owner(%(tag)s) as owner
