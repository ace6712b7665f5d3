-- This script runs at the end of each migration, and enforces two rules. The objects of the schema
-- belong to the owner of the schema. PUBLIC has no privilege on any of them and cannot create
-- objects in the schema, and only the owner of a guard may execute it. (After a restore of a dump
-- without its privileges, every role could execute the functions that run with the privileges of
-- their owner.)
-- This script changes only objects that the migrating role owns, and writes nothing if no change is
-- needed.
DO $fence$
DECLARE
    home CONSTANT oid := (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'tower_fence.resources'::regclass);
    home_owner CONSTANT name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace AS n WHERE n.oid = home);
    is_first CONSTANT boolean := current_setting('tower_fence.first_migration', true) IS NOT DISTINCT FROM 'on';
    object record;
    revokes_all boolean;
    privileges text;
BEGIN
    FOR object IN
        SELECT concat(CASE p.prokind WHEN 'p' THEN 'PROCEDURE ' ELSE 'FUNCTION ' END, p.oid::regprocedure) AS name,
            p.proowner AS owner, coalesce(p.proacl, acldefault('f', p.proowner)) AS rights,
            p.pronamespace = home AS is_ours, 'ALL' AS revoked
        FROM pg_proc AS p
        WHERE p.pronamespace = home
            OR p.prosecdef AND p.proname LIKE 'fence\_guard%'
                AND p.oid IN (SELECT t.tgfoid FROM pg_trigger AS t WHERE t.tgname LIKE 'fence\_guard\_%')
        UNION ALL
        SELECT concat(CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END, c.oid::regclass), c.relowner,
            coalesce(c.relacl, acldefault('r', c.relowner)), true, 'ALL'
        FROM pg_class AS c WHERE c.relnamespace = home AND c.relkind IN ('r', 'p', 'v', 'S')
        UNION ALL
        SELECT concat('DOMAIN ', t.oid::regtype), t.typowner, coalesce(t.typacl, acldefault('T', t.typowner)), true, 'ALL'
        FROM pg_type AS t WHERE t.typnamespace = home AND t.typtype = 'd'
        UNION ALL
        -- A role that creates functions in the schema could overload those of the fence.
        SELECT concat('SCHEMA ', n.oid::regnamespace), n.nspowner, n.nspacl, true, 'CREATE'
        FROM pg_namespace AS n WHERE n.oid = home
    LOOP
        CONTINUE WHEN NOT pg_has_role(object.owner, 'USAGE');
        -- The sequence of an identity column has the owner of its table.
        IF object.is_ours AND object.name NOT LIKE 'SEQUENCE %' AND pg_get_userbyid(object.owner) <> home_owner
            AND pg_has_role(home_owner, 'USAGE')
        THEN
            EXECUTE format('ALTER %s OWNER TO %I', object.name, home_owner);
        END IF;
        -- New objects also have the privileges that ALTER DEFAULT PRIVILEGES has granted. The owner
        -- cannot revoke what another role has granted to PUBLIC, except by revoking all grant
        -- options. No role needs a privilege on a guard.
        revokes_all := is_first OR NOT object.is_ours;
        FOR privileges IN
            SELECT DISTINCT CASE
                WHEN r.grantee = 0 THEN format('%s ON %s FROM PUBLIC', object.revoked, object.name)
                ELSE format('%s%s ON %s FROM %I CASCADE', CASE WHEN NOT revokes_all THEN 'GRANT OPTION FOR ' END,
                    object.revoked, object.name, pg_get_userbyid(r.grantee))
            END
            FROM aclexplode(object.rights) AS r
            WHERE r.grantor = object.owner AND r.grantee <> object.owner
                AND object.revoked IN ('ALL', r.privilege_type)
                AND (r.grantee = 0 OR revokes_all OR r.is_grantable AND EXISTS (
                    SELECT FROM aclexplode(object.rights) AS p
                    WHERE p.grantee = 0 AND p.grantor <> object.owner AND p.privilege_type = r.privilege_type
                ))
        LOOP
            EXECUTE concat('REVOKE ', privileges);
        END LOOP;
    END LOOP;
END
$fence$;
