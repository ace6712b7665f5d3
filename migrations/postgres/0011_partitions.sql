-- For tables that have outgrown one: fence_resources in parts, by hash of the resource. All statements stay as they
-- are, and so does what they promise.

-- Makes fence_resources a partitioned table of so many partitions, with all its rows and with the rights that were
-- granted on it. Its owner calls this, once. Who writes waits meanwhile, or hears that the fence is busy.
CREATE FUNCTION fence_partition_resources(parts integer)
RETURNS void LANGUAGE plpgsql AS $fence$
DECLARE
    before pg_class;
    home text;
    one text;
    given record;
BEGIN
    IF (parts BETWEEN 2 AND 1024) IS NOT TRUE THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'fence_resources is divided into 2 to 1024 partitions';
    -- A snapshot from before the wait for the lock would leave rows behind.
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_transaction_state',
            MESSAGE = 'fence_partition_resources runs at READ COMMITTED';
    END IF;
    LOCK TABLE fence_resources IN ACCESS EXCLUSIVE MODE;
    SELECT c.* INTO before FROM pg_class AS c WHERE c.oid = 'fence_resources'::regclass;
    IF before.relkind <> 'r' THEN
        RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE = 'fence_resources is no plain table';
    END IF;
    home := quote_ident((SELECT n.nspname FROM pg_namespace AS n WHERE n.oid = before.relnamespace));

    ALTER TABLE fence_resources RENAME TO fence_resources_before;
    EXECUTE format(
        'CREATE TABLE %1$s.fence_resources (LIKE %1$s.fence_resources_before INCLUDING DEFAULTS) '
        'PARTITION BY HASH (resource)', home
    );
    FOR place IN 0 .. parts - 1 LOOP
        EXECUTE format(
            'CREATE TABLE %1$s.fence_resources_%3$s PARTITION OF %1$s.fence_resources '
            'FOR VALUES WITH (MODULUS %2$s, REMAINDER %3$s) WITH (%4$s)',
            home, parts, place, coalesce(array_to_string(before.reloptions, ', '), 'fillfactor = 70')
        );
    END LOOP;
    INSERT INTO fence_resources SELECT * FROM fence_resources_before;

    -- The rights are those of before, whatever the default privileges of the schema would give.
    FOR one IN SELECT t.relid::regclass::text FROM pg_partition_tree('fence_resources') AS t LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', one, pg_get_userbyid(before.relowner));
        FOR given IN
            SELECT DISTINCT CASE WHEN r.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(r.grantee)) END
                AS grantee
            FROM pg_class AS c, aclexplode(c.relacl) AS r
            WHERE c.oid = one::regclass AND r.grantee <> before.relowner
        LOOP
            EXECUTE format('REVOKE ALL ON %s FROM %s', one, given.grantee);
        END LOOP;
    END LOOP;
    FOR given IN
        SELECT concat(r.privilege_type, g.columns) AS what,
            CASE WHEN r.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(r.grantee)) END AS grantee,
            CASE WHEN r.is_grantable THEN ' WITH GRANT OPTION' END AS again
        FROM (
            SELECT NULL, before.relacl
            UNION ALL
            SELECT format('(%I)', a.attname), a.attacl FROM pg_attribute AS a
            WHERE a.attrelid = before.oid AND a.attnum > 0 AND NOT a.attisdropped
        ) AS g (columns, rights), aclexplode(g.rights) AS r
        WHERE r.grantee <> before.relowner
    LOOP
        EXECUTE format('GRANT %s ON %s.fence_resources TO %s%s', given.what, home, given.grantee, given.again);
    END LOOP;

    -- What somebody has built on the table, as a view, makes this fail, and then nothing has changed.
    DROP TABLE fence_resources_before;
    ALTER TABLE fence_resources ADD PRIMARY KEY (resource);
    CREATE INDEX fence_resources_partition ON fence_resources (partition);
END
$fence$;

DO $fence$
DECLARE
    given record;
BEGIN
    EXECUTE format(
        'ALTER FUNCTION fence_partition_resources(integer) SET search_path = pg_catalog, %I, pg_temp', current_schema()
    );
    REVOKE ALL ON FUNCTION fence_partition_resources(integer) FROM PUBLIC;
    FOR given IN
        SELECT DISTINCT quote_ident(pg_get_userbyid(r.grantee)) AS grantee
        FROM pg_proc AS p, aclexplode(p.proacl) AS r
        WHERE p.oid = 'fence_partition_resources(integer)'::regprocedure AND r.grantee <> p.proowner
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION fence_partition_resources(integer) FROM %s', given.grantee);
    END LOOP;
END
$fence$;
