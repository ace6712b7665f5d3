-- Protected tables, which refuse each write of a row unless a token for the row's resource was
-- admitted in the same transaction.
--
-- The triggers of a protected table fire in every session (ENABLE ALWAYS). All of them call one
-- function, the guard of the table, which protect() creates in the schema of the table. The guard
-- runs with the privileges of the table's owner, so a role that writes needs no privilege on the
-- fence. The guard runs after the statement, because a statement may contain its own admission. If
-- no token was admitted for the resource of a written row, the guard calls refuse_unfenced(), which
-- raises an error unless the transaction has called bypass().

CREATE TABLE tower_fence.bypasses (
    transaction xid8 PRIMARY KEY,
    role text NOT NULL,
    reason text NOT NULL,
    begun_at timestamptz NOT NULL
);
CREATE INDEX bypasses_begun_at ON tower_fence.bypasses (begun_at);
COMMENT ON TABLE tower_fence.bypasses IS
    'The transactions that have called bypass(), with their reasons. A later call of bypass() removes rows that '
    'are older than a year. Grant no privilege to write to this table, because a row permits writes without an admission.';

CREATE FUNCTION tower_fence.bypass(reason text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF tower_fence.is_distributed() THEN
        RAISE feature_not_supported USING
            MESSAGE = 'bypass is not possible on a distributed fence: its record would have to be on each worker. Call '
                'unprotect() and protect() in the transaction';
    END IF;
    PERFORM tower_fence.warn_outside_transaction('bypass');
    IF (octet_length(bypass.reason) BETWEEN 1 AND 1000) IS NOT TRUE
        OR bypass.reason !~ '[^[:space:]]' OR bypass.reason ~ '[[:cntrl:]]'
    THEN
        RAISE invalid_parameter_value USING MESSAGE = 'a reason must have 1 to 1000 bytes, and no control characters';
    END IF;
    DELETE FROM tower_fence.bypasses WHERE transaction = ANY (ARRAY(
        SELECT b.transaction FROM tower_fence.bypasses AS b
        WHERE b.begun_at < CURRENT_TIMESTAMP - interval '1 year'
        ORDER BY b.begun_at LIMIT 1000 FOR UPDATE SKIP LOCKED
    ));
    -- A row that was restored from another server may have the id of this transaction.
    INSERT INTO tower_fence.bypasses (transaction, role, reason, begun_at)
    VALUES (pg_current_xact_id(), session_user, bypass.reason, CURRENT_TIMESTAMP)
    ON CONFLICT (transaction) DO UPDATE
        SET role = excluded.role, reason = excluded.reason, begun_at = excluded.begun_at;
    RAISE LOG USING MESSAGE = concat('tower-fence: ', session_user, ' bypasses protected tables: ', bypass.reason);
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.bypass IS
    'Allows this transaction to write to protected tables without an admission, until the transaction ends or rolls '
    'back to a savepoint before this call. The reason is written to the table bypasses and to the log of the server.';

CREATE FUNCTION tower_fence.refuse_unfenced(table_schema name, table_name name, resource text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    is_distributed CONSTANT boolean := tower_fence.is_distributed();
    fault text;
BEGIN
    -- The table bypasses is not on the workers of a distributed fence.
    IF NOT is_distributed THEN
        -- A row that was restored from a dump may have the id of a later transaction. The condition
        -- on age() excludes such a row, because an earlier transaction has inserted it.
        PERFORM FROM tower_fence.bypasses AS b
        WHERE b.transaction = pg_current_xact_id_if_assigned() AND age(b.xmin) <= 0;
        IF FOUND THEN
            RETURN false;
        END IF;
    END IF;
    BEGIN
        PERFORM tower_fence.check_resource(refuse_unfenced.resource);
    EXCEPTION WHEN SQLSTATE 'TF400' THEN
        fault := CASE WHEN refuse_unfenced.resource IS NULL THEN 'a column of its pattern is null' ELSE SQLERRM END;
    END;
    RAISE SQLSTATE 'TF428' USING
        SCHEMA = table_schema,
        TABLE = table_name,
        MESSAGE = CASE WHEN fault IS NULL
            THEN format('%I.%I is written without an admission of %s',
                table_schema, table_name, refuse_unfenced.resource)
            ELSE format('a row of %I.%I has no resource: %s', table_schema, table_name, fault)
        END,
        HINT = CASE WHEN fault IS NULL
            THEN 'Call tower_fence.admit() for the resource of each row in the transaction that writes, or '
            ELSE 'Write a row that has a resource, or call '
        END || CASE WHEN is_distributed
            THEN 'tower_fence.unprotect() to write without an admission.'
            ELSE 'tower_fence.bypass() to write without an admission.'
        END,
        DETAIL = json_build_object('resource', left(refuse_unfenced.resource, 255))::text;
END
$fence$;
COMMENT ON FUNCTION tower_fence.refuse_unfenced IS
    'Raises TF428 unless the transaction has called bypass(). The guards of protected tables call this function.';

-- A pattern has no escapes, so a brace is never part of a literal. Without text between two
-- columns, different rows could have the same resource.
CREATE FUNCTION tower_fence.pattern_parts(pattern text)
RETURNS TABLE (literal text, column_name name) LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
    SELECT CASE WHEN left(m.part[1], 1) <> '{' THEN m.part[1] END,
        CASE WHEN left(m.part[1], 1) = '{' THEN substr(m.part[1], 2, length(m.part[1]) - 2)::name END
    FROM regexp_matches(pattern, '\{[^{}]+\}|[^{}]+', 'g') WITH ORDINALITY AS m (part, place)
    WHERE pattern ~ '^([^{}]|\{[^{}]+\})+$' AND pattern COLLATE "C" !~ '\}\{|[\u0001-\u001f\u007f-\u009f]'
    ORDER BY m.place
$fence$;
COMMENT ON FUNCTION tower_fence.pattern_parts IS
    'The literals and the columns of a pattern such as show/{show_id}/seat/{seat}, in order. Returns no row if the '
    'pattern is invalid.';

-- `enabled` is A if the trigger always fires, as protect() configures it, and null if the trigger
-- is missing.
CREATE VIEW tower_fence.protected_tables AS
SELECT c.oid::regclass AS relation, g.pattern, v.guard, t.tgenabled::text AS enabled, g.function,
    ARRAY(
        SELECT p.column_name FROM tower_fence.pattern_parts(g.pattern) AS p
        WHERE p.column_name IS NOT NULL AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attname = p.column_name AND a.attnum > 0 AND NOT a.attisdropped
        )
    ) AS missing_columns
FROM (
    -- A partition that was detached from a protected table keeps a trigger of that table's guard.
    SELECT DISTINCT ON (t.tgrelid, t.tgfoid) t.tgrelid, t.tgfoid::regproc AS function,
        pg_catalog.convert_from(
            pg_catalog.substring(t.tgargs, 1, pg_catalog.octet_length(t.tgargs) - 1), pg_catalog.getdatabaseencoding()
        ) AS pattern
    FROM pg_catalog.pg_trigger AS t
    JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
    -- These conditions exclude the triggers of fences in other schemas, and triggers that have such
    -- a name but were not created by protect().
    WHERE t.tgname LIKE 'fence\_guard\_%' AND t.tgnargs = 1 AND p.proname LIKE 'fence\_guard%' AND p.prosecdef
        AND pg_catalog.strpos(p.prosrc, 'PERFORM tower_fence.') > 0
) AS g
JOIN pg_catalog.pg_class AS c ON c.oid = g.tgrelid AND EXISTS (SELECT FROM tower_fence.pattern_parts(g.pattern))
CROSS JOIN pg_catalog.unnest(
    CASE WHEN c.relkind = 'p' OR c.relispartition OR EXISTS (
        SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = c.oid AND t.tgname = 'fence_guard_rows'
    ) THEN ARRAY['rows', 'truncate']
    ELSE ARRAY['insert', 'update', 'delete', 'truncate', 'attach'] END
) AS v (guard)
LEFT JOIN pg_catalog.pg_trigger AS t ON t.tgrelid = c.oid AND t.tgname = pg_catalog.concat('fence_guard_', v.guard)
    AND t.tgfoid = g.function
    -- After ALTER TABLE OWNER, the guard still belongs to the previous owner, who may change it.
    -- After ALTER TABLE SET SCHEMA, it is still in the previous schema, whose owner may drop it.
    -- Each partition has the guard of its root.
    AND EXISTS (
        SELECT FROM pg_catalog.pg_proc AS p
        JOIN pg_catalog.pg_class AS r ON r.oid = coalesce(pg_catalog.pg_partition_root(c.oid)::oid, c.oid)
        WHERE p.oid = t.tgfoid AND p.proowner = r.relowner AND p.pronamespace = r.relnamespace
    );
COMMENT ON VIEW tower_fence.protected_tables IS
    'The protected tables, with one row for each trigger that the guard of a table needs. A table is protected if it '
    'has rows here, `enabled` is A in all of them, and `missing_columns` is empty. A table that has lost all its '
    'triggers has no row here.';

-- The text of a column must not depend on a setting of the session. Otherwise the same row could
-- belong to different resources in different sessions. Therefore only types whose text is always
-- the same are allowed. Values are converted by concat(), which calls the output function of their
-- type. Any role can create types and casts, but only a superuser can create output functions.
-- Therefore the guard, which runs with the privileges of its owner, never runs code of another
-- role, even as a trigger of another table.
CREATE FUNCTION tower_fence.pattern_expression(relation regclass, pattern text)
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    part record;
    found_column pg_attribute;
    value text;
    base oid;
    kind "char";
    expressions text[] := '{}';
BEGIN
    FOR part IN SELECT * FROM tower_fence.pattern_parts(pattern_expression.pattern) LOOP
        IF part.column_name IS NULL THEN
            expressions := expressions || quote_literal(part.literal);
            CONTINUE;
        END IF;
        SELECT a.* INTO found_column FROM pg_attribute AS a
        WHERE a.attrelid = pattern_expression.relation AND a.attname = part.column_name
            AND a.attnum > 0 AND NOT a.attisdropped;
        IF NOT FOUND THEN
            RAISE undefined_column USING
                MESSAGE = format('%s has no column %I', pattern_expression.relation, part.column_name);
        ELSIF found_column.attgenerated = 'v' THEN
            RAISE invalid_column_reference USING
                MESSAGE = format('%I is a virtual generated column, whose value a trigger does not see', part.column_name),
                HINT = 'Use a stored generated column of type text.';
        END IF;
        -- Qualify a name that is also the name of a variable of PL/pgSQL or of the rows. Otherwise,
        -- if the column is renamed later, the guard would read the variable or the whole row
        -- instead. Do not qualify other names, because Postgres reads `fence_rows.count` as
        -- `count(fence_rows)` if there is no such column.
        value := CASE
            WHEN part.column_name IN ('found', 'new', 'old', 'is_unfenced', 'unfenced', 'fence_rows')
                OR part.column_name LIKE 'tg\_%' THEN format('fence_rows.%I', part.column_name)
            -- A later version of the server may reserve the name, so it is always quoted.
            ELSE concat('"', replace(part.column_name, '"', '""'), '"')
        END;
        base := found_column.atttypid;
        LOOP
            SELECT t.typtype, CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE base END INTO kind, base
            FROM pg_type AS t WHERE t.oid = base;
            EXIT WHEN kind <> 'd';
        END LOOP;
        IF kind <> 'e' AND base NOT IN ('text'::regtype, 'varchar'::regtype, 'int2'::regtype, 'int4'::regtype,
            'int8'::regtype, 'uuid'::regtype, 'boolean'::regtype)
        THEN
            RAISE invalid_column_reference USING
                MESSAGE = format('a pattern cannot use the column %I of type %s', part.column_name,
                    format_type(found_column.atttypid, found_column.atttypmod)),
                DETAIL = 'It can use text, varchar, integers, uuid, boolean, enumerations, and domains over them.',
                HINT = 'Use a stored generated column of type text.';
        END IF;
        expressions := expressions || format('CASE WHEN %1$s IS NOT NULL THEN concat(%1$s)%2$s END', value,
            CASE base WHEN 'boolean'::regtype THEN '::boolean::text' END);
    END LOOP;
    IF cardinality(expressions) = 0 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'a pattern must be text with columns in braces, such as show/{show_id}/seat/{seat}',
            HINT = 'Put text between any two columns. Control characters are not allowed.';
    END IF;
    RETURN format('(%s) COLLATE "C"', array_to_string(expressions, ' || '));
END
$fence$;
COMMENT ON FUNCTION tower_fence.pattern_expression IS 'The SQL expression that fills a pattern from a row of a table.';

-- The arguments are the expression of the pattern, the FROM items of the new and of the old rows of
-- a statement, and the column by which Citus has distributed the table.
--
-- Most statements write rows of one resource. Therefore the first query compares each row with the
-- admitted resource of the first row. If all rows match, the second query is skipped. Otherwise the
-- second query checks each resource separately. Both queries are static, so that their plans are
-- cached. The query for TRUNCATE is built at run time, because each partition has its own TRUNCATE
-- trigger. That query first checks one row. It reads the whole table only if the resource of that
-- row was admitted. Every query of a table can run code of the table's owner, for example in the
-- expression of an index. Therefore the guard reads only tables of its own owner.
--
-- The guard refuses a trigger without transition tables, because the names of these tables could
-- then refer to temporary tables.
CREATE FUNCTION tower_fence.guard_text(resource text, new_rows text, old_rows text, column_beside name)
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    inserted CONSTANT text := format('SELECT %s AS resource FROM %s AS fence_rows', resource, new_rows);
    deleted CONSTANT text := format('SELECT %s AS resource FROM %s AS fence_rows', resource, old_rows);
    -- The condition on age() is explained in refuse_unfenced().
    admitted CONSTANT text := 'SELECT f.resource FROM tower_fence.resources AS f '
        'WHERE f.admitted_by = pg_current_xact_id_if_assigned() AND age(f.xmin) <= 0 AND f.resource = ';
    is_refused CONSTANT text := format('(%sr.resource) IS NULL LIMIT 1', admitted);
    needs_transition_tables CONSTANT text := $needs$ELSIF TG_OP <> 'TRUNCATE' AND NOT EXISTS (
        SELECT FROM pg_trigger AS t WHERE t.tgrelid = TG_RELID AND t.tgname = TG_NAME
            AND (t.tgnewtable = 'fence_new' OR TG_OP = 'DELETE') AND (t.tgoldtable = 'fence_old' OR TG_OP = 'INSERT')
    ) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = concat('the trigger ', TG_NAME, ' of ', TG_RELID::regclass, ' lacks the transition tables of a guard'),
            HINT = 'Call tower_fence.protect() again.';
    $needs$;
    checks CONSTANT text := $checks$
        PERFORM FROM (%1$s) AS r WHERE (r.resource = (
            %3$s(SELECT r.resource FROM (%2$s) AS r LIMIT 1)
        )) IS NOT TRUE;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        SELECT true, r.resource INTO is_unfenced, unfenced
        FROM (SELECT DISTINCT r.resource FROM (%1$s) AS r) AS r WHERE %4$s;$checks$;
    as_text CONSTANT text := 'CASE WHEN %1$s."%2$s" IS NOT NULL THEN concat(%1$s."%2$s") END';
BEGIN
    IF column_beside IS NOT NULL THEN
        RETURN format($guard$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        RAISE feature_not_supported USING
            MESSAGE = concat('the guard of ', TG_RELID::regclass, ' cannot see which rows a TRUNCATE removes'),
            HINT = 'DELETE the rows after an admission of each resource.';
    ELSIF current_setting('session_replication_role') = 'replica' THEN
        -- Citus is moving the shard. The worker from which the rows are replicated has checked the
        -- writes.
        RETURN NULL;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        PERFORM tower_fence.require_admission(TG_RELID, %2$s);
    END IF;
    -- No statement on the coordinator can change the column, but a statement on a shard can.
    IF TG_OP = 'INSERT' OR (TG_OP = 'UPDATE' AND %1$s IS DISTINCT FROM %2$s) THEN
        PERFORM tower_fence.require_admission(TG_RELID, %1$s);
    END IF;
    RETURN NULL;
EXCEPTION WHEN undefined_column THEN
    RAISE undefined_column USING
        MESSAGE = concat('the pattern of the protected table ', TG_RELID::regclass,
            ' names a column that was renamed or dropped: ', SQLERRM),
        HINT = 'Call tower_fence.protect() with the column by which the table is distributed now.';
END
$guard$, format(as_text, 'NEW', replace(column_beside, '"', '""')), format(as_text, 'OLD', replace(column_beside, '"', '""')));
    END IF;
    RETURN format(
        $guard$
#variable_conflict use_column
DECLARE
    is_unfenced boolean;
    unfenced text;
BEGIN
    IF TG_OP = 'TRUNCATE' AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- TRUNCATE removes rows that a transaction at a stricter isolation level does not see.
        RAISE invalid_transaction_state USING
            MESSAGE = concat('at a stricter level than READ COMMITTED, rows of ', TG_RELID::regclass,
                ' are hidden from its guard'),
            HINT = 'TRUNCATE a protected table at READ COMMITTED.';
    ELSIF TG_OP = 'TRUNCATE' AND row_security_active(TG_RELID) THEN
        RAISE insufficient_privilege USING
            MESSAGE = concat('row-level security hides rows of ', TG_RELID::regclass, ' from its guard'),
            HINT = concat('Exempt the owner of the table from its policies: ALTER TABLE ', TG_RELID::regclass,
                ' NO FORCE ROW LEVEL SECURITY. After a change of the owner, call tower_fence.protect() again.');
    ELSIF TG_OP = 'TRUNCATE' AND EXISTS (
        WITH RECURSIVE tree AS (
            SELECT TG_RELID AS relation
            UNION SELECT i.inhrelid FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.relation
        )
        SELECT FROM tree JOIN pg_class AS c ON c.oid = tree.relation WHERE pg_get_userbyid(c.relowner) <> current_user
    ) THEN
        RAISE insufficient_privilege USING
            MESSAGE = concat('the guard of ', TG_RELID::regclass, ' runs with the privileges of ', current_user,
                ', which does not own the table and all its partitions'),
            HINT = 'Change the owner of the partitions. After a change of the table''s owner, call '
                'tower_fence.protect() again.';
    %7$sEND IF;
    BEGIN
        IF TG_OP = 'INSERT' THEN%1$s
        ELSIF TG_OP = 'UPDATE' THEN%2$s
        ELSIF TG_OP = 'DELETE' THEN%3$s
        ELSE
            -- With `enable_seqscan = off`, the scan of the table has a high cost, which would start
            -- the JIT compiler.
            PERFORM set_config('enable_seqscan', 'on', true);
            EXECUTE concat(%4$L, TG_RELID::regclass, %5$L, TG_RELID::regclass, %6$L) INTO is_unfenced, unfenced;
        END IF;
        IF is_unfenced THEN
            PERFORM tower_fence.refuse_unfenced(TG_TABLE_SCHEMA, TG_TABLE_NAME, unfenced);
        END IF;
    EXCEPTION WHEN undefined_column OR datatype_mismatch OR invalid_text_representation THEN
        RAISE EXCEPTION USING
            ERRCODE = SQLSTATE,
            MESSAGE = concat('the pattern of the protected table ', TG_RELID::regclass,
                ' names a column that was renamed, dropped or retyped: ', SQLERRM),
            HINT = 'Call tower_fence.protect() with a pattern of the columns that the table has now.';
    WHEN insufficient_privilege THEN
        RAISE insufficient_privilege USING
            MESSAGE = concat('the guard of ', TG_RELID::regclass, ' runs with the privileges of ', current_user,
                ': ', SQLERRM),
            HINT = 'This role needs the privileges that tower_fence.protect() checks.';
    END;
    RETURN NULL;
END
$guard$,
        format(checks, inserted, inserted, admitted, is_refused),
        format(checks, concat(inserted, ' UNION ALL ', deleted), inserted, admitted, is_refused),
        format(checks, deleted, deleted, admitted, is_refused),
        format('SELECT true, r.resource FROM ((SELECT %s AS resource FROM ', resource),
        format(' AS fence_rows LIMIT 1) UNION ALL SELECT DISTINCT %s FROM ', resource),
        format(' AS fence_rows) AS r WHERE %s', is_refused),
        CASE WHEN new_rows = 'fence_new' THEN needs_transition_tables END
    );
END
$fence$;
COMMENT ON FUNCTION tower_fence.guard_text IS
    'The body of the guard of a protected table, which Citus may have distributed by the column `column_beside`.';

-- PL/pgSQL plans a statement when it is first executed. Therefore the catalogs of Citus, which most
-- servers do not have, are named only in statements that such servers do not execute.
CREATE FUNCTION tower_fence.column_beside(relation regclass)
RETURNS name LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'citus') THEN
        RETURN NULL;
    END IF;
    RETURN (
        SELECT column_to_column_name(p.logicalrelid, p.partkey)
        FROM pg_catalog.pg_dist_partition AS p JOIN pg_catalog.pg_dist_partition AS f
            ON f.colocationid = p.colocationid AND f.partmethod = 'h' AND f.logicalrelid = 'tower_fence.resources'::regclass
        WHERE p.logicalrelid = relation
    );
END
$fence$;
COMMENT ON FUNCTION tower_fence.column_beside IS
    'The distribution column of a table that Citus has distributed and colocated with the fence, or null for any other '
    'table.';

-- Citus refuses a query of a distributed table in a trigger on a shard. The guard therefore reads
-- the shard of `resources` that is colocated with the written shard, and that contains the rows of
-- the same resources. The function looks up the name of that shard for each row, because all shards
-- of a table share one guard.
CREATE FUNCTION tower_fence.require_admission(shard regclass, resource text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    own_number CONSTANT bigint := substring(require_admission.shard::text FROM '_([0-9]{1,18})"?$')::bigint;
    own record;
    is_admitted boolean;
BEGIN
    -- shard_name() omits the schema public.
    SELECT n.nspname, c.relname, concat(
        CASE WHEN o.nspname = 'public' THEN 'public.' END, shard_name(f.logicalrelid, f.shardid)
    ) AS beside INTO own
    FROM pg_catalog.pg_dist_shard AS s
    JOIN pg_class AS c ON c.oid = s.logicalrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_dist_partition AS p ON p.logicalrelid = s.logicalrelid
    JOIN pg_catalog.pg_dist_shard AS f ON f.shardminvalue = s.shardminvalue
    JOIN pg_catalog.pg_dist_partition AS q ON q.logicalrelid = f.logicalrelid AND q.colocationid = p.colocationid
    JOIN pg_class AS r ON r.oid = f.logicalrelid JOIN pg_namespace AS o ON o.oid = r.relnamespace
    WHERE s.shardid = own_number AND f.logicalrelid = 'tower_fence.resources'::regclass
        AND to_regclass(concat(
            CASE WHEN n.nspname = 'public' THEN 'public.' END, shard_name(s.logicalrelid, s.shardid)
        )) = require_admission.shard;
    IF own.beside IS NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = concat(shard, ' is protected, and is not a shard that is colocated with a shard of the fence');
    END IF;
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM %s AS f WHERE f.resource = $1 '
        'AND f.admitted_by = pg_current_xact_id_if_assigned() AND age(f.xmin) <= 0)', own.beside
    ) INTO is_admitted USING require_admission.resource;
    IF NOT is_admitted THEN
        PERFORM tower_fence.refuse_unfenced(own.nspname, own.relname, require_admission.resource);
    END IF;
    RETURN is_admitted;
END
$fence$;
COMMENT ON FUNCTION tower_fence.require_admission IS
    'Raises TF428 unless the transaction of this worker has admitted a token for the resource, and 55000 if the shard '
    'is not colocated with a shard of the fence. If Citus has distributed a protected table, the guard of the table '
    'calls this function with the shard that is written.';

CREATE FUNCTION tower_fence.unprotectable(relation regclass)
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    reason CONSTANT text := (SELECT CASE
        WHEN c.relkind = 'f' THEN
            'it is a foreign table, and postgres_fdw commits the remote side first and separately: a write could stay '
            'without its admission'
        WHEN c.relkind NOT IN ('r', 'p') THEN 'it is not a table'
        WHEN c.relpersistence = 't' THEN 'it is temporary'
        WHEN c.relnamespace = 'pg_catalog'::regnamespace THEN 'it belongs to the server'
        WHEN c.relnamespace = to_regnamespace(rtrim('tower_fence.', '.')) THEN 'it belongs to the fence'
        WHEN c.relispartition THEN concat('it is a partition: protect ', pg_partition_root(c.oid))
        WHEN c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits AS i WHERE c.oid IN (i.inhrelid, i.inhparent))
            THEN 'it inherits, or another table inherits from it'
        WHEN EXISTS (
            SELECT FROM pg_partition_tree(c.oid) AS t JOIN pg_class AS p ON p.oid = t.relid WHERE p.relkind = 'f'
        ) THEN 'one of its partitions is a foreign table, and postgres_fdw commits the remote side first and separately'
    END FROM pg_class AS c WHERE c.oid = relation);
    is_known boolean;
    is_distributed boolean;
BEGIN
    IF reason IS NOT NULL OR NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'citus') THEN
        RETURN reason;
    END IF;
    is_known := EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = relation);
    is_distributed := EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = 'tower_fence.resources'::regclass);
    -- A guard reads `resources` in the transaction that writes. On a shard, a guard can read only
    -- the shard of `resources` on the same worker. On the coordinator, a guard does not see the
    -- transaction of a worker.
    RETURN CASE
        WHEN is_distributed AND NOT is_known
            THEN 'the fence is distributed, and its admissions are transactions of the workers'
        WHEN NOT is_known THEN NULL
        WHEN NOT is_distributed
            THEN 'it is in the metadata of Citus, and triggers on shards cannot read the fence on the coordinator'
        WHEN tower_fence.column_beside(relation) IS NULL
            THEN 'the fence is not colocated with it, so triggers on its shards cannot read the fence'
        WHEN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = relation) = 'p' THEN 'it is partitioned and distributed'
        WHEN (
            SELECT quote_ident(n.nspname) <> n.nspname
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation
        ) THEN 'the name of its schema needs quotes, which Citus omits when it changes the privileges of a function'
        -- Without DDL propagation, only the coordinator would have the triggers.
        WHEN concat(current_setting('citus.enable_unsafe_triggers', true),
            current_setting('citus.enable_ddl_propagation', true)) <> 'onon'
            THEN 'to change triggers on shards, SET citus.enable_unsafe_triggers = on and '
                'SET citus.enable_ddl_propagation = on before the call'
    END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.unprotectable IS
    'The reason why a table cannot be protected, or null if it can be protected.';

CREATE FUNCTION tower_fence.protect(relation regclass, pattern text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    protected pg_class;
    table_owner name;
    fence_schema CONSTANT regnamespace := to_regnamespace(rtrim('tower_fence.', '.'));
    reason text := tower_fence.unprotectable(protect.relation);
    column_beside CONSTANT name := tower_fence.column_beside(protect.relation);
    other_fence name;
    is_allowed boolean;
    expression text;
    sources text[];
    guard_function text;
    number integer;
    made record;
BEGIN
    SELECT c.* INTO protected FROM pg_class AS c WHERE c.oid = protect.relation;
    IF protected IS NULL OR protect.pattern IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'protect needs a table and a pattern';
    ELSIF reason IS NULL AND NOT pg_has_role(protected.relowner, 'USAGE') THEN
        RAISE insufficient_privilege USING MESSAGE = format('must be owner of table %s', protect.relation);
    ELSIF reason IS NULL AND column_beside IS NULL THEN
        -- A concurrent transaction may be changing the properties that were checked, so lock the
        -- table and check them again. CREATE TRIGGER takes this lock in any case.
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', protect.relation);
        reason := tower_fence.unprotectable(protect.relation);
    END IF;
    IF reason IS NOT NULL THEN
        RAISE wrong_object_type USING MESSAGE = format('%s cannot be protected: %s', protect.relation, reason);
    END IF;
    -- The triggers of all fences have the same names. If the schema of the other fence was dropped,
    -- its unprotect() is missing, so this call replaces its triggers.
    other_fence := (
        SELECT n.nspname FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
        JOIN pg_namespace AS n ON n.oid <> fence_schema AND strpos(p.prosrc, concat('PERFORM ', n.nspname, '.')) > 0
        WHERE t.tgrelid IN (SELECT protect.relation UNION SELECT o.relid FROM pg_partition_tree(protect.relation) AS o)
            AND t.tgname LIKE 'fence\_guard\_%' AND p.proname LIKE 'fence\_guard%' AND p.prosecdef
            AND strpos(p.prosrc, 'PERFORM tower_fence.') = 0
            AND EXISTS (SELECT FROM pg_proc AS u WHERE u.pronamespace = n.oid AND u.proname = 'unprotect')
        LIMIT 1
    );
    IF other_fence IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('%s is protected by another fence', protect.relation),
            HINT = format('Call %s.unprotect() first.', other_fence);
    END IF;
    table_owner := pg_get_userbyid(protected.relowner);
    -- The guard runs with the privileges of the table's owner.
    is_allowed := CASE WHEN column_beside IS NULL
        THEN has_table_privilege(table_owner, 'tower_fence.resources', 'SELECT')
            AND has_function_privilege(table_owner, 'tower_fence.refuse_unfenced(name, name, text)', 'EXECUTE')
        ELSE has_function_privilege(table_owner, 'tower_fence.require_admission(regclass, text)', 'EXECUTE') END;
    IF NOT (is_allowed AND has_schema_privilege(table_owner, fence_schema, 'USAGE')) THEN
        RAISE insufficient_privilege USING
            MESSAGE = format('%s, the owner of %s, lacks privileges on the fence', table_owner, protect.relation),
            HINT = format(CASE WHEN column_beside IS NULL
                THEN 'GRANT USAGE ON SCHEMA %2$s TO %1$I; GRANT SELECT ON %2$s.resources TO %1$I; '
                    'GRANT EXECUTE ON FUNCTION %2$s.refuse_unfenced TO %1$I'
                ELSE 'GRANT USAGE ON SCHEMA %2$s TO %1$I; GRANT EXECUTE ON FUNCTION %2$s.require_admission TO %1$I' END,
                table_owner, fence_schema);
    ELSIF column_beside IS NOT NULL AND protect.pattern <> format('{%s}', column_beside) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('the pattern of %s must be {%s}, the distribution column by which it is colocated with the fence',
                protect.relation, column_beside);
    END IF;

    -- This transaction changes both the triggers and their function, so Citus must use a single
    -- connection to each node.
    PERFORM set_config('citus.multi_shard_modify_mode', 'sequential', true) WHERE column_beside IS NOT NULL;
    expression := tower_fence.pattern_expression(protect.relation, protect.pattern);
    sources := CASE protected.relkind
        WHEN 'r' THEN ARRAY['fence_new', 'fence_old']
        ELSE ARRAY(
            SELECT format('(SELECT %s)', (
                -- PL/pgSQL and SQL reserve different words, so the names are always quoted.
                SELECT string_agg(DISTINCT format('%s."%s"', of, replace(p.column_name, '"', '""')), ', ')
                FROM tower_fence.pattern_parts(protect.pattern) AS p WHERE p.column_name IS NOT NULL
            ))
            FROM unnest(ARRAY['NEW', 'OLD']) WITH ORDINALITY AS o (of, place) ORDER BY o.place
        )
    END;

    -- If the table already has a guard in its schema that belongs to its owner, replace that
    -- function. Otherwise, find a new name. A detached partition still has the guard of its former
    -- root. Do not replace that function, because the root still needs it.
    guard_function := (
        SELECT DISTINCT format('%I.%I', n.nspname, p.proname)
        FROM tower_fence.protected_tables AS g JOIN pg_proc AS p ON p.oid = g.function
        JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE g.relation = protect.relation AND p.proowner = protected.relowner AND p.pronamespace = protected.relnamespace
            -- On Citus, the shards of the table have the guard as well.
            AND (column_beside IS NOT NULL OR NOT EXISTS (
                SELECT FROM pg_trigger AS t
                WHERE t.tgfoid = g.function AND t.tgrelid <> protect.relation
                    AND t.tgrelid NOT IN (SELECT o.relid FROM pg_partition_tree(protect.relation) AS o)
            ))
    );
    -- Shards that Citus has moved have copies of the triggers of the previous guard.
    PERFORM tower_fence.unprotect(protect.relation) WHERE guard_function IS NULL AND column_beside IS NOT NULL;
    WHILE guard_function IS NULL LOOP
        guard_function := format('%s.%I', protected.relnamespace::regnamespace, concat('fence_guard', number, '_', CASE
            -- Citus does not quote this name when it sends the privileges to the workers.
            WHEN column_beside IS NULL THEN protected.relname
            ELSE regexp_replace(lower(protected.relname COLLATE "C"), '[^a-z0-9_]', '_', 'g') END)::name);
        IF to_regprocedure(concat(guard_function, '()')) IS NOT NULL THEN
            guard_function := NULL;
            number := coalesce(number, 1) + 1;
        END IF;
    END LOOP;
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER '
        'SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS %L', guard_function,
        tower_fence.guard_text(expression, sources[1], sources[2], column_beside)
    );
    -- Only the owner may execute the guard. Another role could otherwise use the guard as a trigger
    -- of its own table, with types whose code would run with the privileges of the owner.
    EXECUTE (
        SELECT format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC%s CASCADE', guard_function, string_agg(
            concat(', ', quote_ident(pg_get_userbyid(a.grantee))), '') FILTER (WHERE a.grantee <> 0))
        FROM pg_proc AS p, aclexplode(p.proacl) AS a
        WHERE p.oid = format('%s()', guard_function)::regprocedure AND a.grantee <> p.proowner
    );
    EXECUTE format('ALTER FUNCTION %s() OWNER TO %I', guard_function, table_owner);

    -- A statement trigger does not see rows that are written directly to a partition, or through a
    -- parent. Therefore a table also has the trigger `attach`, which never fires, but prevents the
    -- table from becoming a partition or a child. A partitioned table has a row trigger, which each
    -- of its partitions inherits. A table of Citus also has a row trigger, because its shards may
    -- become partitions of other tables. A TRUNCATE trigger is not inherited, so each partition
    -- gets its own.
    FOR made IN
        SELECT protect.relation AS relation, v.name, v.event, v.scope
        FROM (VALUES
            ('r', 'insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS fence_new FOR EACH STATEMENT'),
            ('r', 'update', 'AFTER UPDATE',
                'REFERENCING NEW TABLE AS fence_new OLD TABLE AS fence_old FOR EACH STATEMENT'),
            ('r', 'delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS fence_old FOR EACH STATEMENT'),
            ('r', 'attach', 'AFTER DELETE', 'REFERENCING OLD TABLE AS fence_old FOR EACH ROW WHEN (false)'),
            ('p', 'rows', 'AFTER INSERT OR UPDATE OR DELETE', 'FOR EACH ROW')
        ) AS v (relkind, name, event, scope)
        WHERE v.relkind = CASE WHEN column_beside IS NULL THEN protected.relkind ELSE 'p' END
        UNION ALL
        SELECT t.relid, 'truncate', 'BEFORE TRUNCATE', 'FOR EACH STATEMENT' FROM (
            SELECT protect.relation UNION SELECT p.relid FROM pg_partition_tree(protect.relation) AS p
        ) AS t (relid)
    LOOP
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER fence_guard_%s %s ON %s %s EXECUTE FUNCTION %s(%L)',
            made.name, made.event, made.relation, made.scope, guard_function, protect.pattern
        );
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER fence_guard_%s', made.relation, made.name);
    END LOOP;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.protect IS
    'Makes a table refuse each statement that writes a row for whose resource no token was admitted in the '
    'transaction. The name of the resource is the pattern, such as show/{show_id}/seat/{seat}, filled from the columns '
    'of the row. Only the owner of the table can protect it. A second call replaces the pattern, and adds missing '
    'triggers to new partitions. Columns are found by name, and only this call checks their types. Repeat the call '
    'after a change of the type or the name of a column. A TRUNCATE needs an admission for each resource in the table, '
    'and a transaction at READ COMMITTED.';

CREATE FUNCTION tower_fence.unprotect(relation regclass)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    relations CONSTANT regclass[] := ARRAY(
        SELECT unprotect.relation UNION SELECT p.relid FROM pg_partition_tree(unprotect.relation) AS p
    );
    -- A partition keeps the TRUNCATE trigger of another table from which it was detached.
    guard_functions CONSTANT regproc[] := ARRAY(
        SELECT DISTINCT g.function FROM tower_fence.protected_tables AS g WHERE g.relation = ANY (relations)
    );
    is_distributed boolean := false;
    made record;
BEGIN
    -- As in column_beside(), only servers with Citus execute the statement that names its catalog.
    IF to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL THEN
        is_distributed := EXISTS (
            SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = unprotect.relation AND p.partmethod = 'h'
        );
    END IF;
    IF (SELECT c.relispartition FROM pg_class AS c WHERE c.oid = unprotect.relation) THEN
        RAISE wrong_object_type USING MESSAGE = format(
            '%1$s is a partition of %2$s: call tower_fence.unprotect(%2$L)',
            unprotect.relation, pg_partition_root(unprotect.relation)
        );
    ELSIF guard_functions <> '{}' AND is_distributed AND concat(current_setting('citus.enable_unsafe_triggers', true),
        current_setting('citus.enable_ddl_propagation', true)) <> 'onon'
    THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'to change triggers on shards, SET citus.enable_unsafe_triggers = on and '
                'SET citus.enable_ddl_propagation = on before the call';
    END IF;
    PERFORM set_config('citus.multi_shard_modify_mode', 'sequential', true) WHERE is_distributed;
    -- A trigger that a partition has inherited is dropped together with the trigger of its parent.
    FOR made IN
        SELECT t.tgrelid::regclass AS relation, t.tgname FROM pg_trigger AS t
        WHERE t.tgfoid = ANY (guard_functions) AND t.tgparentid = 0 AND t.tgrelid = ANY (relations)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', made.tgname, made.relation);
    END LOOP;
    -- After ALTER TABLE OWNER, the guard may still belong to the previous owner.
    FOR made IN
        SELECT p.oid::regproc AS function FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE p.oid = ANY (guard_functions) AND (pg_has_role(p.proowner, 'USAGE') OR pg_has_role(n.nspowner, 'USAGE'))
            AND NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = p.oid)
    LOOP
        -- CASCADE drops the copies of the triggers on shards that Citus has moved or split, which
        -- are not dropped with the triggers of the table.
        EXECUTE format('DROP FUNCTION %s() CASCADE', made.function);
    END LOOP;
    RETURN guard_functions <> '{}';
END
$fence$;
COMMENT ON FUNCTION tower_fence.unprotect IS
    'Removes the protection of a table, and the triggers that its partitions have kept from another table. Returns false '
    'if there is nothing to remove.';
