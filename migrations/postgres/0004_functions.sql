-- The fence as functions, for programs that do not use this crate. A refusal is an error: TF412 for a stale
-- token, TF400 for what is no token or no name. Its DETAIL is the problem document, as JSON.
--
-- They run with the rights of their owner, so a role needs EXECUTE and no right on the tables. Nobody but the
-- owner has EXECUTE unless it is granted. Every argument is written with the name of its function, since
-- some are called as columns are.

CREATE FUNCTION fence_refuse_malformed(detail text)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'TF400',
        MESSAGE = fence_refuse_malformed.detail,
        DETAIL = pg_catalog.json_build_object(
            'type', 'https://docs.rs/tower-fence/latest/tower_fence/problem/#malformed-token',
            'title', 'The fencing token is malformed',
            'status', 400,
            'detail', fence_refuse_malformed.detail
        )::text;
END
$fence$;

CREATE FUNCTION fence_refuse_stale(resource text, presented_token bigint, max_token bigint)
RETURNS void LANGUAGE plpgsql AS $fence$
DECLARE
    message text := pg_catalog.concat(
        'token ', presented_token, ' for ', resource, ' is not newer than ', max_token
    );
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'TF412',
        MESSAGE = message,
        DETAIL = pg_catalog.json_build_object(
            'type', 'https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token',
            'title', 'The fencing token is stale',
            'status', 412,
            'detail', message,
            'resource', resource,
            'presented_token', presented_token,
            'max_token', max_token
        )::text;
END
$fence$;

-- Refuses what is no token: the range is that of an RFC 9651 Integer.
CREATE FUNCTION fence_check_token(token bigint)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
    IF (fence_check_token.token BETWEEN 1 AND 999999999999999) IS NOT TRUE THEN
        PERFORM fence_refuse_malformed(pg_catalog.concat(
            'a fencing token is an integer from 1 to 999999999999999, not ',
            coalesce(fence_check_token.token::text, 'null')
        ));
    END IF;
END
$fence$;

-- Refuses what names no resource: 1 to 255 bytes of UTF-8, without control characters (category Cc).
CREATE FUNCTION fence_check_resource(resource text)
RETURNS void LANGUAGE plpgsql AS $fence$
DECLARE
    bytes integer := pg_catalog.octet_length(
        pg_catalog.convert_to(fence_check_resource.resource, 'UTF8')
    );
BEGIN
    IF bytes IS NULL THEN
        PERFORM fence_refuse_malformed('a resource name cannot be null');
    ELSIF bytes = 0 THEN
        PERFORM fence_refuse_malformed('a resource name cannot be empty');
    ELSIF bytes > 255 THEN
        PERFORM fence_refuse_malformed(
            pg_catalog.concat('a resource name has at most 255 bytes, not ', bytes)
        );
    ELSIF fence_check_resource.resource COLLATE "C" ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
        PERFORM fence_refuse_malformed('a resource name has no control characters');
    END IF;
END
$fence$;

-- Admits a token in the caller's transaction, and returns what max_token became: the token, or one below
-- where it may write again. The row stays locked until that transaction ends.
CREATE FUNCTION fence_admit(resource text, token bigint, reusable boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    floor bigint;
    found_token bigint;
BEGIN
    IF (fence_admit.token BETWEEN 1 AND 999999999999999) IS NOT TRUE THEN
        PERFORM fence_check_token(fence_admit.token);
    END IF;
    floor := CASE WHEN fence_admit.reusable THEN fence_admit.token - 1 ELSE fence_admit.token END;

    UPDATE fence_resources AS f SET max_token = floor, updated_at = CURRENT_TIMESTAMP
    WHERE f.resource = fence_admit.resource AND f.max_token < fence_admit.token;
    IF FOUND THEN
        RETURN floor;
    END IF;

    -- There is no row, or a newer one. Each statement sees what was committed before it.
    found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_admit.resource);
    IF found_token IS NULL THEN
        PERFORM fence_check_resource(fence_admit.resource);
    END IF;
    IF found_token IS NULL OR found_token < fence_admit.token THEN
        INSERT INTO fence_resources AS f (resource, max_token, updated_at)
        VALUES (fence_admit.resource, floor, CURRENT_TIMESTAMP)
        ON CONFLICT (resource) DO UPDATE
            SET max_token = excluded.max_token, updated_at = excluded.updated_at
            WHERE f.max_token < fence_admit.token;
        IF FOUND THEN
            RETURN floor;
        END IF;
        found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_admit.resource);
    END IF;
    PERFORM fence_refuse_stale(
        fence_admit.resource, fence_admit.token, coalesce(found_token, fence_admit.token)
    );
END
$fence$;

-- Makes every token below this one dead, without a write, and returns max_token.
CREATE FUNCTION fence_raise(resource text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    floor bigint;
    found_token bigint;
BEGIN
    PERFORM fence_check_token(fence_raise.token);
    floor := fence_raise.token - 1;

    -- The row may be younger than the transaction: its time does not go back.
    UPDATE fence_resources AS f
    SET max_token = floor, updated_at = greatest(f.updated_at, CURRENT_TIMESTAMP)
    WHERE f.resource = fence_raise.resource AND f.max_token < floor;
    IF FOUND THEN
        RETURN floor;
    END IF;

    found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_raise.resource);
    IF found_token IS NULL THEN
        PERFORM fence_check_resource(fence_raise.resource);
    END IF;
    IF found_token IS NULL OR found_token < floor THEN
        INSERT INTO fence_resources AS f (resource, max_token, updated_at)
        VALUES (fence_raise.resource, floor, CURRENT_TIMESTAMP)
        ON CONFLICT (resource) DO UPDATE
            SET max_token = excluded.max_token, updated_at = greatest(f.updated_at, CURRENT_TIMESTAMP)
            WHERE f.max_token < floor;
        IF FOUND THEN
            RETURN floor;
        END IF;
        found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_raise.resource);
    END IF;
    IF found_token >= fence_raise.token THEN
        PERFORM fence_refuse_stale(fence_raise.resource, fence_raise.token, found_token);
    END IF;
    RETURN found_token;
END
$fence$;

-- The highest token that is dead; null where the resource was never seen.
CREATE FUNCTION fence_max_token(resource text)
RETURNS bigint LANGUAGE plpgsql STABLE SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    found_token bigint := (
        SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_max_token.resource
    );
BEGIN
    IF found_token IS NULL THEN
        PERFORM fence_check_resource(fence_max_token.resource);
    END IF;
    RETURN found_token;
END
$fence$;

-- Whatever the caller's search_path is, and whatever temporary tables it has: names of the server come first,
-- then those of this schema, and the caller's last. CREATE OR REPLACE takes this back, and has to be followed
-- by it.
DO $fence$
DECLARE
    made regprocedure;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'fence_refuse_malformed(text)',
        'fence_refuse_stale(text, bigint, bigint)',
        'fence_check_token(bigint)',
        'fence_check_resource(text)',
        'fence_admit(text, bigint, boolean)',
        'fence_raise(text, bigint)',
        'fence_max_token(text)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', made, current_schema()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
END
$fence$;
