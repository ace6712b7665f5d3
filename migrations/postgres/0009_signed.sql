-- Tokens that the issuer has signed, for programs that may write and shall not be able to make up a token. What is signed
-- is in src/spec.md. HMAC-SHA-256 is made of the server's own sha256, so no extension is needed.

-- Whoever reads this can sign. The secret is kept as HMAC takes it: filled up to a block of SHA-256, each byte combined with
-- 0x36 and with 0x5c.
CREATE TABLE fence_token_keys (
    id text COLLATE "C" PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9._-]{1,64}$'),
    audience text NOT NULL,
    inner_block bytea NOT NULL,
    outer_block bytea NOT NULL
);

-- Verifies with one more key from now on. A server that logs statements logs the secret, also where it is bound, and it logs those
-- that fail: to be called in a session that does neither (log_statement, log_min_duration_statement, log_min_error_statement).
CREATE FUNCTION fence_add_token_key(id text, secret bytea, audience text DEFAULT '')
RETURNS boolean LANGUAGE plpgsql AS $fence$
DECLARE
    -- 64 bytes of zero.
    inner_block bytea := decode(repeat('00', 64), 'hex');
    outer_block bytea := inner_block;
    key bytea := fence_add_token_key.secret;
    octet integer;
BEGIN
    -- The errors of the table show its rows, and with them the secret.
    IF (fence_add_token_key.id COLLATE "C" ~ '^[A-Za-z0-9._-]{1,64}$') IS NOT TRUE THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'the id of a key has 1 to 64 characters of A-Z a-z 0-9 - _ .';
    ELSIF fence_add_token_key.audience IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'the audience of a key is a text, which may be empty';
    ELSIF (octet_length(key) >= 32) IS NOT TRUE THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = concat('a key has at least 32 bytes, not ', coalesce(octet_length(key)::text, 'null'));
    END IF;
    IF octet_length(key) > 64 THEN
        key := sha256(key);
    END IF;
    FOR place IN 0 .. 63 LOOP
        octet := CASE WHEN place < octet_length(key) THEN get_byte(key, place) ELSE 0 END;
        inner_block := set_byte(inner_block, place, octet # 54);
        outer_block := set_byte(outer_block, place, octet # 92);
    END LOOP;
    INSERT INTO fence_token_keys (id, audience, inner_block, outer_block)
    VALUES (fence_add_token_key.id, fence_add_token_key.audience, inner_block, outer_block)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'unique_violation',
            MESSAGE = concat('there is a key ', fence_add_token_key.id, ' already');
    END IF;
    RETURN true;
END
$fence$;

-- One reason, whatever is wrong.
CREATE FUNCTION fence_refuse_forged()
RETURNS void LANGUAGE plpgsql AS $fence$
DECLARE
    message CONSTANT text := 'the fencing token was not signed by the issuer';
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'TF403',
        MESSAGE = message,
        DETAIL = json_build_object(
            'type', 'https://docs.rs/tower-fence/latest/tower_fence/problem/#forged-token',
            'title', 'The fencing token is not the issuer''s',
            'status', 403,
            'detail', message
        )::text;
END
$fence$;

-- What is signed has each text with its length in front.
CREATE FUNCTION fence_signed_text(octets bytea)
RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $fence$
BEGIN
    RETURN int8send(octet_length(fence_signed_text.octets)) || fence_signed_text.octets;
END
$fence$;

-- Verifies the value of a Fencing-Token field with one member, as an issuer has written it.
CREATE FUNCTION fence_verify(field text, OUT resource text, OUT token bigint)
LANGUAGE plpgsql STABLE AS $fence$
#variable_conflict use_column
DECLARE
    parts CONSTANT text[] := string_to_array(fence_verify.field, '"');
    last CONSTANT integer := cardinality(parts);
    name text;
    octets bytea;
    key record;
    mac bytea;
    nonce CONSTANT bytea := uuid_send(gen_random_uuid());
BEGIN
    -- The name is a String, or a Display String. Neither captures nor bounds for the key, which would cost ten times as much.
    IF (octet_length(fence_verify.field) <= 1024 AND fence_verify.field COLLATE "C" ~
        E'^[1-9][0-9]{0,14};resource=(?:"(?:[ !#-\\[\\]-~]|\\\\["\\\\])*"|%"(?:[ !#$&-~]|%[0-9a-f]{2})*")'
        ';key="[A-Za-z0-9._-]+";mac=:[A-Za-z0-9+/]{22}==:$') IS NOT TRUE
    THEN
        PERFORM fence_refuse_forged();
    END IF;
    token := split_part(fence_verify.field, ';', 1)::bigint;
    -- A quotation mark in the name has parted it; the key has none.
    name := array_to_string(parts[2 : last - 3], '"');
    IF right(parts[1], 1) = '%' THEN
        octets := coalesce((
            SELECT string_agg(
                CASE WHEN left(m.part[1], 1) = '%' THEN decode(substr(m.part[1], 2), 'hex')
                    ELSE convert_to(m.part[1], 'UTF8') END,
                ''::bytea ORDER BY m.place
            )
            FROM regexp_matches(name, '%..|[^%]+', 'g') WITH ORDINALITY AS m (part, place)
        ), '');
    ELSE
        octets := convert_to(regexp_replace(name, E'\\\\(.)', E'\\1', 'g'), 'UTF8');
    END IF;
    SELECT k.audience, k.inner_block, k.outer_block INTO key FROM fence_token_keys AS k WHERE k.id = parts[last - 1];
    -- Done without such a key as well, and then in vain.
    mac := substr(sha256(coalesce(key.outer_block, '') || sha256(
        coalesce(key.inner_block, '') || convert_to('tower-fence token v1', 'UTF8')
        || fence_signed_text(convert_to(parts[last - 1], 'UTF8'))
        || fence_signed_text(convert_to(coalesce(key.audience, ''), 'UTF8'))
        || fence_signed_text(octets) || int8send(token)
    )), 1, 16);
    -- How long a comparison takes tells how much is equal. Of these digests, which are others each time, that is of no use.
    IF key.inner_block IS NULL
        OR sha256(nonce || mac) <> sha256(nonce || decode(substr(parts[last], 7, 24), 'base64'))
    THEN
        PERFORM fence_refuse_forged();
    END IF;
    resource := convert_from(octets, 'UTF8');
END
$fence$;

-- fence_admit, for a token that the issuer has signed: the value of its Fencing-Token field.
CREATE FUNCTION fence_admit_signed(field text, reusable boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
DECLARE
    signed record := fence_verify(fence_admit_signed.field);
    context text;
BEGIN
    GET DIAGNOSTICS context = PG_CONTEXT;
    IF position(E'\n' IN context) = 0 THEN
        PERFORM fence_warn_alone('fence_admit_signed');
    END IF;
    RETURN fence_admit(signed.resource, signed.token, fence_admit_signed.reusable);
END
$fence$;

-- fence_raise, likewise.
CREATE FUNCTION fence_raise_signed(field text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
DECLARE
    signed record := fence_verify(fence_raise_signed.field);
BEGIN
    RETURN fence_raise(signed.resource, signed.token);
END
$fence$;

DO $fence$
DECLARE
    made regprocedure;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'fence_add_token_key(text, bytea, text)',
        'fence_refuse_forged()',
        'fence_signed_text(bytea)',
        'fence_verify(text)',
        'fence_admit_signed(text, boolean)',
        'fence_raise_signed(text)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', made, current_schema()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
END
$fence$;
