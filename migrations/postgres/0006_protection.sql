-- The backstop: tables that refuse every write whose transaction has not admitted the resource of the row.
--
-- A protected table has triggers that fire always, and one function for all of them, made by fence_protect in the
-- schema of the table. That function runs with the rights of the table's owner, so whoever writes needs no right
-- here. It looks behind the statement (AFTER), as a statement may bring its own admission along. Where rows are
-- refused it calls fence_refuse_unfenced, which lets those pass that have called fence_bypass.

-- Every transaction that went past protected tables, and why. Nobody has a right on this table but its owner, or
-- the permission to go past could be made by hand.
CREATE TABLE fence_bypasses (
    transaction xid8 PRIMARY KEY,
    role text NOT NULL,
    reason text NOT NULL,
    begun_at timestamptz NOT NULL
);

-- Lets this transaction write to protected tables without an admission, until it ends or goes back to a
-- savepoint before. The reason goes to the server's log; what is older than a year is forgotten here.
CREATE FUNCTION fence_bypass(reason text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    context text;
BEGIN
    GET DIAGNOSTICS context = PG_CONTEXT;
    IF position(E'\n' IN context) = 0 THEN
        PERFORM fence_warn_alone('fence_bypass');
    END IF;
    IF (octet_length(fence_bypass.reason) BETWEEN 1 AND 1000) IS NOT TRUE
        OR fence_bypass.reason !~ '[^[:space:]]' OR fence_bypass.reason ~ '[[:cntrl:]]'
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'a reason has 1 to 1000 bytes, without control characters';
    END IF;
    DELETE FROM fence_bypasses WHERE transaction = ANY (ARRAY(
        SELECT b.transaction FROM fence_bypasses AS b
        WHERE b.begun_at < CURRENT_TIMESTAMP - interval '1 year' FOR UPDATE SKIP LOCKED
    ));
    -- A row that came from another server may have the same number.
    INSERT INTO fence_bypasses (transaction, role, reason, begun_at)
    VALUES (pg_current_xact_id(), session_user, fence_bypass.reason, CURRENT_TIMESTAMP)
    ON CONFLICT (transaction) DO UPDATE
        SET role = excluded.role, reason = excluded.reason, begun_at = excluded.begun_at;
    RAISE LOG USING MESSAGE = concat(
        'tower-fence: ', session_user, ' goes past protected tables: ', fence_bypass.reason
    );
    RETURN true;
END
$fence$;

-- Refuses a write to this table, but not in a transaction that has called fence_bypass.
CREATE FUNCTION fence_refuse_unfenced(table_schema name, table_name name, resource text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
BEGIN
    -- Rows of a dump have old numbers of transactions, which come again: hence the age.
    PERFORM FROM fence_bypasses AS b
    WHERE b.transaction = pg_current_xact_id_if_assigned() AND age(b.xmin) <= 0;
    IF FOUND THEN
        RETURN;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'TF428',
        SCHEMA = fence_refuse_unfenced.table_schema,
        TABLE = fence_refuse_unfenced.table_name,
        MESSAGE = CASE WHEN fence_refuse_unfenced.resource IS NULL
            THEN format('a row of %I.%I has no resource, so nobody may write it',
                fence_refuse_unfenced.table_schema, fence_refuse_unfenced.table_name)
            ELSE format('%I.%I is written without an admission of %s',
                fence_refuse_unfenced.table_schema, fence_refuse_unfenced.table_name,
                left(fence_refuse_unfenced.resource, 255))
        END,
        DETAIL = json_build_object(
            'type', 'https://docs.rs/tower-fence/latest/tower_fence/problem/#unfenced-write',
            'title', 'A protected table was written without an admission',
            'status', 500,
            'detail', 'the transaction has not admitted the resource of each row that it writes'
        )::text;
END
$fence$;

-- What is protected: a row for each trigger that a table needs. `enabled` is A where it fires always, as
-- fence_protect has left it, and null where it is missing.
CREATE VIEW fence_protected AS
SELECT c.oid::regclass AS relation, v.guard, t.tgenabled::text AS enabled, g.function, g.resource, g.prefix
FROM (
    SELECT DISTINCT ON (t.tgrelid) t.tgrelid, t.tgfoid::regproc AS function,
        convert_from(substring(t.tgargs FOR a.length), getdatabaseencoding()) AS resource,
        convert_from(
            substring(t.tgargs FROM a.length + 2 FOR octet_length(t.tgargs) - a.length - 2), getdatabaseencoding()
        ) AS prefix
    FROM pg_trigger AS t, LATERAL (SELECT position(decode('00', 'hex') IN t.tgargs) - 1) AS a (length)
    WHERE t.tgname LIKE 'fence\_guard\_%' AND t.tgnargs = 2
) AS g
JOIN pg_class AS c ON c.oid = g.tgrelid
CROSS JOIN unnest(
    CASE WHEN c.relkind = 'p' OR c.relispartition THEN ARRAY['rows', 'truncate']
    ELSE ARRAY['insert', 'update', 'delete', 'truncate', 'attach'] END
) AS v (guard)
LEFT JOIN pg_trigger AS t ON t.tgrelid = c.oid AND t.tgname = concat('fence_guard_', v.guard) AND t.tgfoid = g.function
    -- After ALTER TABLE OWNER the guard still is that of somebody else, who may change it.
    AND EXISTS (SELECT FROM pg_proc AS p WHERE p.oid = t.tgfoid AND p.proowner = c.relowner);

-- The columns that an expression over a row of this table uses; an error where it is none. A CHECK takes what
-- depends on one row alone. Names are looked up as they will be in the guard.
CREATE FUNCTION fence_columns_of(relation regclass, expression text)
RETURNS name[] LANGUAGE plpgsql AS $fence$
DECLARE
    trial text := format('pg_temp.%I', (
        SELECT c.relname FROM pg_class AS c WHERE c.oid = fence_columns_of.relation
    ));
    columns name[];
BEGIN
    EXECUTE format('CREATE TEMPORARY TABLE %s (LIKE %s)', trial, fence_columns_of.relation);
    EXECUTE format(
        E'ALTER TABLE %s ADD CONSTRAINT trial CHECK ((%s\n)::text IS NOT NULL)', trial, fence_columns_of.expression
    );
    columns := ARRAY(
        SELECT a.attname FROM pg_constraint AS c
        JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND a.attnum = ANY (c.conkey)
        WHERE c.conrelid = trial::regclass AND c.conname = 'trial'
    );
    IF EXISTS (
        SELECT FROM pg_constraint AS c, unnest(c.conkey) AS k (number)
        WHERE c.conrelid = trial::regclass AND c.conname = 'trial' AND k.number < 1
    ) THEN
        RAISE invalid_column_reference USING
            MESSAGE = 'the resource of a row is made of its columns, not of the whole row';
    END IF;
    IF EXISTS (
        SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
        WHERE a.attrelid = trial::regclass AND a.attname = ANY (columns)
            AND ARRAY[a.atttypid, t.typelem, t.typbasetype] && ARRAY['float4', 'float8', 'bytea']::regtype[]::oid[]
    ) OR position(E'\\' IN expression) > 0 THEN
        RAISE invalid_column_reference USING
            MESSAGE = 'the text of a row''s resource must not depend on the settings of a session',
            DETAIL = 'floating-point numbers, bytea, and literals with a backslash do';
    END IF;
    -- A trigger does not see their values. No version before 18 has them.
    IF EXISTS (
        SELECT FROM pg_attribute AS a
        WHERE a.attrelid = fence_columns_of.relation AND a.attname = ANY (columns) AND a.attgenerated = 'v'
    ) THEN
        RAISE invalid_column_reference USING
            MESSAGE = 'the resource of a row must not use a virtual generated column',
            HINT = 'Use the columns that it is generated from, or a stored generated column.';
    END IF;
    -- An index takes what depends on nothing but the row. The label of an enumeration is one.
    IF NOT EXISTS (
        SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
        WHERE a.attrelid = trial::regclass AND quote_ident(a.attname) = expression AND t.typtype = 'e'
    ) THEN
        EXECUTE format(E'CREATE INDEX ON %s (((%s\n)::text))', trial, expression);
    END IF;
    EXECUTE format('DROP TABLE %s', trial);
    RETURN columns;
END
$fence$;

-- The text of the function that guards a table. `resource` is an expression over a row of what stands in FROM:
-- the rows that a statement has written, as they are now and as they were before.
--
-- Mostly all of them belong to one resource. So the first query compares each with the admitted resource of the
-- first, and the second, which looks for each resource by itself, is for the others. Both are static, so that
-- their plans are kept. Only TRUNCATE, which each partition has of its own, looks up its table.
CREATE FUNCTION fence_guard_text(resource text, new_rows text, old_rows text, table_rows text)
RETURNS text LANGUAGE plpgsql STABLE AS $fence$
DECLARE
    fence_schema text := (
        SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = 'fence_resources'::regclass
    );
    inserted text := format('SELECT %s AS resource FROM %s', resource, new_rows);
    deleted text := format('SELECT %s AS resource FROM %s', resource, old_rows);
    -- Rows of a dump have old numbers of transactions, which come again: hence the age.
    admitted text := format(
        'SELECT f.resource FROM %s.fence_resources AS f '
        'WHERE f.admitted_by = pg_current_xact_id_if_assigned() AND age(f.xmin) <= 0 AND f.resource = ',
        fence_schema
    );
    is_refused text := format('(%sr.resource) IS NULL LIMIT 1', admitted);
    look text := $look$
        PERFORM FROM (%1$s) AS r WHERE (r.resource = (
            %3$s(SELECT r.resource FROM (%2$s) AS r LIMIT 1)
        )) IS NOT TRUE;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        SELECT true, r.resource INTO is_unfenced, unfenced
        FROM (SELECT DISTINCT r.resource FROM (%1$s) AS r) AS r WHERE %4$s;$look$;
BEGIN
    RETURN format(
        $guard$
#variable_conflict use_column
DECLARE
    is_unfenced boolean;
    unfenced text;
BEGIN
    IF current_setting('timezone_abbreviations') <> 'Default' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = concat('timezone_abbreviations must be Default in a session that writes to ',
                TG_RELID::regclass, ', which is protected');
    END IF;
    IF TG_OP = 'INSERT' THEN%1$s
    ELSIF TG_OP = 'UPDATE' THEN%2$s
    ELSIF TG_OP = 'DELETE' THEN%3$s
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        -- TRUNCATE takes away what a stricter transaction does not see.
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_transaction_state',
            MESSAGE = concat('at a stricter level than READ COMMITTED, rows of ', TG_RELID::regclass,
                ' are hidden from its guard');
    ELSIF row_security_active(TG_RELID) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = concat('row-level security hides rows of ', TG_RELID::regclass, ' from its guard');
    ELSE
        EXECUTE concat(%4$L, TG_RELID::regclass, %5$L) INTO is_unfenced, unfenced;
    END IF;
    IF is_unfenced THEN
        PERFORM %6$s.fence_refuse_unfenced(TG_TABLE_SCHEMA, TG_TABLE_NAME, unfenced);
    END IF;
    RETURN NULL;
END
$guard$,
        format(look, inserted, inserted, admitted, is_refused),
        format(look, concat(inserted, ' UNION ALL ', deleted), inserted, admitted, is_refused),
        format(look, deleted, deleted, admitted, is_refused),
        format('SELECT true, r.resource FROM (SELECT DISTINCT %s AS resource FROM ', resource),
        format('%s) AS r WHERE %s', table_rows, is_refused),
        fence_schema
    );
END
$fence$;

-- Why a table cannot be protected; null where it can.
CREATE FUNCTION fence_unprotectable(relation regclass)
RETURNS text LANGUAGE sql STABLE AS $fence$
    SELECT CASE
        WHEN c.relkind NOT IN ('r', 'p') THEN 'it is no table'
        WHEN c.relpersistence = 't' THEN 'it is temporary'
        WHEN c.relnamespace = 'pg_catalog'::regnamespace THEN 'it belongs to the server'
        WHEN c.relnamespace = (SELECT f.relnamespace FROM pg_class AS f WHERE f.oid = 'fence_resources'::regclass)
            AND c.relname IN (
                'fence_resources', 'fence_epochs', 'fence_epoch_source', 'fence_floors', 'fence_idempotency_keys',
                'fence_bypasses', '_tower_fence_migrations'
            ) THEN 'it belongs to the fence'
        WHEN c.relispartition THEN concat('it is a partition: protect ', pg_partition_root(c.oid))
        WHEN c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits AS i WHERE c.oid IN (i.inhrelid, i.inhparent))
            THEN 'it inherits, or is inherited'
        WHEN EXISTS (
            SELECT FROM pg_partition_tree(c.oid) AS t JOIN pg_class AS p ON p.oid = t.relid WHERE p.relkind = 'f'
        ) THEN 'one of its partitions is a foreign table'
    END FROM pg_class AS c WHERE c.oid = relation
$fence$;

-- Makes a table refuse each statement that writes a row whose resource its transaction has not admitted. The
-- resource is a column or an expression over the row, as text, behind the prefix. The caller has to own the
-- table. Called again it replaces, and gives new partitions what they do not inherit.
CREATE FUNCTION fence_protect(relation regclass, resource text, prefix text DEFAULT '')
RETURNS boolean LANGUAGE plpgsql AS $fence$
DECLARE
    protected pg_class;
    table_schema name;
    table_owner name;
    fence_schema CONSTANT regnamespace := (
        SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'fence_resources'::regclass
    );
    reason text := fence_unprotectable(fence_protect.relation);
    expression text;
    columns name[];
    sources text[];
    settings CONSTANT text := (
        SELECT string_agg(format('SET %I = %L', split_part(s, '=', 1), substr(s, position('=' IN s) + 1)), ' ')
        FROM pg_proc AS p, unnest(p.proconfig) AS s
        WHERE p.oid = 'fence_columns_of(regclass, text)'::regprocedure AND s NOT LIKE 'search_path=%'
    );
    guard_function text;
    number integer;
    made record;
BEGIN
    SELECT c.* INTO protected FROM pg_class AS c WHERE c.oid = fence_protect.relation;
    IF protected IS NULL OR fence_protect.resource IS NULL OR fence_protect.prefix IS NULL THEN
        RAISE null_value_not_allowed USING
            MESSAGE = 'fence_protect needs a table, a resource, and a prefix, which may be empty';
    ELSIF reason IS NOT NULL THEN
        RAISE wrong_object_type USING
            MESSAGE = format('%s cannot be protected: %s', fence_protect.relation, reason);
    ELSIF NOT pg_has_role(protected.relowner, 'USAGE') THEN
        RAISE insufficient_privilege USING MESSAGE = format('must be owner of table %s', fence_protect.relation);
    END IF;
    table_schema := (SELECT n.nspname FROM pg_namespace AS n WHERE n.oid = protected.relnamespace);
    table_owner := pg_get_userbyid(protected.relowner);
    -- The guard has the rights of the owner.
    IF NOT has_schema_privilege(table_owner, fence_schema, 'USAGE')
        OR NOT has_table_privilege(table_owner, 'fence_resources', 'SELECT')
        OR NOT has_function_privilege(table_owner, 'fence_refuse_unfenced(name, name, text)', 'EXECUTE')
    THEN
        RAISE insufficient_privilege USING
            MESSAGE = format('%s, who owns %s, may not ask the fence', table_owner, fence_protect.relation),
            HINT = format(
                'GRANT USAGE ON SCHEMA %2$s TO %1$I; GRANT SELECT ON fence_resources TO %1$I; '
                'GRANT EXECUTE ON FUNCTION fence_refuse_unfenced TO %1$I', table_owner, fence_schema
            );
    END IF;

    -- The name of a column, or an expression as it is; a new line for what may be a comment.
    expression := (
        SELECT quote_ident(a.attname) FROM pg_attribute AS a
        WHERE a.attrelid = fence_protect.relation AND a.attname = fence_protect.resource
            AND a.attnum > 0 AND NOT a.attisdropped
    );
    expression := coalesce(expression, fence_protect.resource || E'\n');
    columns := fence_columns_of(fence_protect.relation, expression);
    expression := format(
        '(%s(%s)::text) COLLATE "C"', quote_literal(nullif(fence_protect.prefix, '')) || ' || ', expression
    );
    sources := CASE protected.relkind
        WHEN 'r' THEN ARRAY['fence_new', 'fence_old']
        ELSE ARRAY(
            SELECT format('(SELECT %s)', (SELECT string_agg(format('%s.%I', of, c), ', ') FROM unnest(columns) AS c))
            FROM unnest(ARRAY['NEW', 'OLD']) AS of
        )
    END;

    -- The owner's function that guards it already, or one whose name nobody uses.
    guard_function := (
        SELECT DISTINCT format('%I.%I', n.nspname, p.proname)
        FROM fence_protected AS g JOIN pg_proc AS p ON p.oid = g.function
        JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE g.relation = fence_protect.relation AND p.proowner = protected.relowner
    );
    WHILE guard_function IS NULL LOOP
        guard_function := format('%I.%I', table_schema, concat('fence_guard', number, '_', protected.relname)::name);
        IF to_regprocedure(concat(guard_function, '()')) IS NOT NULL THEN
            guard_function := NULL;
            number := coalesce(number, 1) + 1;
        END IF;
    END LOOP;
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER '
        'SET search_path = pg_catalog, pg_temp %s AS %L',
        guard_function,
        settings,
        fence_guard_text(
            expression,
            format('%s AS %I', sources[1], protected.relname),
            format('%s AS %I', sources[2], protected.relname),
            format(' AS %I', protected.relname)
        )
    );
    -- Whoever may execute it may make it the trigger of another table, whose types run code of theirs.
    EXECUTE (
        SELECT format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC%s', guard_function, string_agg(
            concat(', ', quote_ident(pg_get_userbyid(a.grantee))), '') FILTER (WHERE a.grantee <> 0))
        FROM pg_proc AS p, aclexplode(p.proacl) AS a
        WHERE p.oid = format('%s()', guard_function)::regprocedure AND a.grantee <> p.proowner
    );
    EXECUTE format('ALTER FUNCTION %s() OWNER TO %I', guard_function, table_owner);

    -- Triggers that look at whole statements see nothing of what is written to a partition, or through a parent.
    -- So a table has one more, which never fires, and which keeps it from becoming a partition or an heir; and a
    -- partitioned table has one that looks at rows, which each of its partitions inherits. TRUNCATE is
    -- not inherited.
    FOR made IN
        SELECT fence_protect.relation AS relation, v.name, v.event, v.scope
        FROM (VALUES
            ('r', 'insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS fence_new FOR EACH STATEMENT'),
            ('r', 'update', 'AFTER UPDATE',
                'REFERENCING NEW TABLE AS fence_new OLD TABLE AS fence_old FOR EACH STATEMENT'),
            ('r', 'delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS fence_old FOR EACH STATEMENT'),
            ('r', 'attach', 'AFTER DELETE', 'REFERENCING OLD TABLE AS fence_old FOR EACH ROW WHEN (false)'),
            ('p', 'rows', 'AFTER INSERT OR UPDATE OR DELETE', 'FOR EACH ROW')
        ) AS v (relkind, name, event, scope) WHERE v.relkind = protected.relkind
        UNION ALL
        SELECT t.relid, 'truncate', 'BEFORE TRUNCATE', 'FOR EACH STATEMENT' FROM (
            SELECT fence_protect.relation UNION SELECT p.relid FROM pg_partition_tree(fence_protect.relation) AS p
        ) AS t (relid)
    LOOP
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER fence_guard_%s %s ON %s %s EXECUTE FUNCTION %s(%L, %L)',
            made.name, made.event, made.relation, made.scope, guard_function,
            fence_protect.resource, fence_protect.prefix
        );
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER fence_guard_%s', made.relation, made.name);
    END LOOP;
    RETURN true;
END
$fence$;

-- Takes back what fence_protect has made. A table that is not protected stays as it is: false.
CREATE FUNCTION fence_unprotect(relation regclass)
RETURNS boolean LANGUAGE plpgsql AS $fence$
DECLARE
    guard_function regproc := (
        SELECT DISTINCT g.function FROM fence_protected AS g WHERE g.relation = fence_unprotect.relation
    );
    made record;
BEGIN
    IF (SELECT c.relispartition FROM pg_class AS c WHERE c.oid = fence_unprotect.relation) THEN
        RAISE wrong_object_type USING MESSAGE = format(
            '%s is a partition of %s, which is protected as a whole',
            fence_unprotect.relation, pg_partition_root(fence_unprotect.relation)
        );
    END IF;
    -- Those that a partition has inherited go with the one they come from.
    FOR made IN
        SELECT t.tgrelid::regclass AS relation, t.tgname FROM pg_trigger AS t
        WHERE t.tgfoid = guard_function AND t.tgparentid = 0 AND t.tgrelid IN (
            SELECT fence_unprotect.relation
            UNION SELECT p.relid FROM pg_partition_tree(fence_unprotect.relation) AS p
        )
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', made.tgname, made.relation);
    END LOOP;
    IF guard_function IS NOT NULL AND NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = guard_function) THEN
        EXECUTE format('DROP FUNCTION %s()', guard_function);
    END IF;
    RETURN guard_function IS NOT NULL;
END
$fence$;

DO $fence$
DECLARE
    made regprocedure;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'fence_bypass(text)',
        'fence_refuse_unfenced(name, name, text)',
        'fence_guard_text(text, text, text, text)',
        'fence_unprotectable(regclass)',
        'fence_protect(regclass, text, text)',
        'fence_unprotect(regclass)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', made, current_schema()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
    -- As the guard looks names up, and no other schema.
    ALTER FUNCTION fence_columns_of(regclass, text) SET search_path = pg_catalog, pg_temp;
    -- The settings on which the text of an expression can depend. fence_protect and fence_columns_of read expressions
    -- under them, and each guard copies them. timezone_abbreviations is missing: to set it, the server reads a file.
    FOREACH made IN ARRAY ARRAY[
        'fence_columns_of(regclass, text)',
        'fence_protect(regclass, text, text)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s '
            'SET "TimeZone" = ''UTC'' '
            'SET "DateStyle" = ''ISO, MDY'' '
            'SET "IntervalStyle" = ''postgres'' '
            'SET extra_float_digits = 1 '
            'SET bytea_output = ''hex'' '
            'SET quote_all_identifiers = off '
            'SET array_nulls = on '
            'SET transform_null_equals = off '
            'SET xmlbinary = ''base64'' '
            'SET xmloption = ''content'' '
            'SET lc_monetary = ''C'' '
            'SET lc_numeric = ''C'' '
            'SET lc_time = ''C'' '
            'SET default_text_search_config = ''pg_catalog.simple'' '
            'SET backslash_quote = ''safe_encoding'' '
            'SET standard_conforming_strings = on', made
        );
    END LOOP;
    REVOKE ALL ON FUNCTION fence_columns_of(regclass, text) FROM PUBLIC;
END
$fence$;
