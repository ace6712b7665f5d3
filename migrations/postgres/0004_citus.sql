-- The fence on Citus, an extension that distributes the tables of a database over several servers.
--
-- Without Citus nothing here is used, except that join_citus() finds that there is nothing to do.
--
-- Citus commits the servers of the tables ("workers") before the server that the application is
-- connected to ("coordinator"), unless it uses two phases, and it does not know plain local tables
-- of the coordinator: a COMMIT that fails there would leave a write on a worker without its token. So
-- join_citus() makes each transaction that writes to a table of the fence commit in two phases.
--
-- distribute() goes further: each row of `resources` is on the worker that has the rows that it
-- fences, and Citus delegates an admission to that worker.

-- No row is ever in it. A statement that changes a table in the metadata of Citus makes the
-- transaction commit in two phases, whether or not it finds a row.
CREATE TABLE tower_fence.commit_marks (
    id integer PRIMARY KEY
);
COMMENT ON TABLE tower_fence.commit_marks IS
    'Always empty. On a coordinator of Citus, a transaction that touches it commits in two phases.';

CREATE FUNCTION tower_fence.commit_in_two_phases()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    DELETE FROM tower_fence.commit_marks WHERE id = 1;
    RETURN NULL;
END
$fence$;
COMMENT ON FUNCTION tower_fence.commit_in_two_phases() IS
    'The trigger of the tables of the fence on a coordinator of Citus.';

-- The catalogs of Citus are read by EXECUTE: most servers do not have them.
CREATE FUNCTION tower_fence.citus_role()
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    is_worker boolean;
    has_nodes boolean;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'citus') THEN
        RETURN 'none';
    END IF;
    EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_local_group WHERE groupid <> 0), '
        'EXISTS (SELECT FROM pg_catalog.pg_dist_node)' INTO is_worker, has_nodes;
    RETURN CASE WHEN is_worker THEN 'worker' WHEN has_nodes THEN 'coordinator' ELSE 'alone' END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.citus_role() IS
    'What this server is in a Citus cluster: none (no Citus), alone (no other node is known), coordinator or worker.';

CREATE FUNCTION tower_fence.is_distributed()
RETURNS boolean LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    found boolean := false;
BEGIN
    IF tower_fence.citus_role() IN ('coordinator', 'worker') THEN
        EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p '
            'WHERE p.logicalrelid = $1 AND p.partmethod = ''h'')'
        INTO found USING 'tower_fence.resources'::regclass;
    END IF;
    RETURN found;
END
$fence$;
COMMENT ON FUNCTION tower_fence.is_distributed() IS 'Whether distribute() has distributed this fence.';

CREATE FUNCTION tower_fence.join_citus()
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    role CONSTANT text := tower_fence.citus_role();
    is_known boolean;
    relation regclass;
BEGIN
    IF role IN ('none', 'alone') THEN
        RETURN role;
    ELSIF role = 'worker' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'this server is a worker of a Citus cluster, where the fence has no tables of its own',
            HINT = 'Connect to the coordinator.';
    END IF;
    EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = $1)'
    INTO is_known USING 'tower_fence.commit_marks'::regclass;
    IF NOT is_known THEN
        EXECUTE 'SELECT pg_catalog.citus_add_local_table_to_metadata($1)' USING 'tower_fence.commit_marks'::regclass;
    END IF;
    -- A statement of another table of the fence is not part of a write of the application.
    FOREACH relation IN ARRAY ARRAY[
        'tower_fence.resources', 'tower_fence.epochs', 'tower_fence.idempotency_keys', 'tower_fence.leases',
        'tower_fence.bypasses'
    ]::regclass[] LOOP
        EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = $1)'
        INTO is_known USING relation;
        CONTINUE WHEN is_known OR EXISTS (
            SELECT FROM pg_trigger AS t WHERE t.tgrelid = relation AND t.tgname = 'fence_two_phases' AND t.tgenabled = 'A'
        );
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER fence_two_phases AFTER INSERT OR UPDATE OR DELETE ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION tower_fence.commit_in_two_phases()', relation
        );
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER fence_two_phases', relation);
    END LOOP;
    RETURN role;
END
$fence$;
COMMENT ON FUNCTION tower_fence.join_citus() IS
    'On a coordinator of Citus, makes each transaction that writes to the fence commit in two phases. Each migration '
    'calls it. Returns citus_role().';

-- A guard reads `resources` in the transaction that writes. On a shard it cannot read a table that
-- Citus plans, and on the coordinator it does not see the transaction of a worker.
CREATE FUNCTION tower_fence.unprotectable_on_citus(relation regclass)
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    is_known boolean;
BEGIN
    IF tower_fence.citus_role() = 'none' THEN
        RETURN NULL;
    ELSIF tower_fence.is_distributed() THEN
        RETURN 'the fence is distributed, and its admissions are transactions of the workers';
    END IF;
    EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = $1)'
    INTO is_known USING relation;
    RETURN CASE WHEN is_known THEN 'it is in the metadata of Citus, and triggers on shards cannot read the fence' END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.unprotectable_on_citus(regclass) IS
    'Why a table cannot be protected on a server that has Citus; null if it can.';
