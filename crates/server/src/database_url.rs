//! Database URLs, parsed like libpq.

use std::{env, fs::File, path::Path};

use reqwest::Url;
use sqlx::postgres::{PgConnectOptions, PgSslMode};

use crate::{
    failure::{Failure, chain},
    secrets::{ESCAPES, is_ambiguous, variable},
};

/// The treatment of a parameter of the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Treatment {
    /// The driver supports the parameter.
    Honoured,
    /// The parameter has no effect, because the program meets its requirement in any case, or
    /// because it only tunes the connection.
    Ignored,
    /// The parameter is refused, because the connection would differ from the one that the URL
    /// describes. The text names an alternative.
    Refused(&'static str),
}

/// Parses a URL like libpq.
pub fn options(url: &str) -> Result<PgConnectOptions, Failure> {
    let Some(rest) = ["postgres://", "postgresql://"]
        .iter()
        .find_map(|scheme| url.strip_prefix(scheme))
    else {
        return Err(invalid("it must begin with postgres://"));
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    // Without this check, a part of the password would be parsed as another part of the URL, and
    // could be shown in a message.
    if is_ambiguous(url) || path.contains('#') {
        return Err(invalid(ESCAPES));
    }
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    if host.contains(',') {
        return Err(invalid(SEVERAL_HOSTS));
    }
    // The URL parser rejects a user without a host, as in `postgres://me@/shop`.
    let has_only_user = host.is_empty() && !user.is_empty();
    let accepted = if has_only_user { path } else { rest };
    let whole = Url::parse(&format!("postgres://{accepted}"));
    let mut whole = whole.map_err(|error| invalid(&error.to_string()))?;
    let pairs: Vec<_> = whole.query_pairs().into_owned().collect();
    whole.set_query(None);
    let (mut mode, mut root_cert, mut fallback_name) = (None, None, None);
    for (parameter, value) in &pairs {
        match treatment(parameter, value) {
            Treatment::Honoured => {}
            Treatment::Ignored => {
                tracing::info!(parameter, "a parameter of the database URL has no effect");
                continue;
            }
            Treatment::Refused(instead) => {
                let text = format!("the parameter {parameter} is not supported; {instead}");
                return Err(invalid(&text));
            }
        }
        match &**parameter {
            "host" | "hostaddr" | "port" if value.contains(',') => {
                return Err(invalid(SEVERAL_HOSTS));
            }
            "sslmode" | "ssl-mode" => mode = Some(value.to_ascii_lowercase()),
            "sslrootcert" | "ssl-root-cert" | "ssl-ca" => {
                root_cert = Some(&**value);
                if value == SYSTEM {
                    continue;
                }
            }
            "fallback_application_name" => {
                fallback_name = Some(&**value);
                continue;
            }
            _ => {}
        }
        whole.query_pairs_mut().append_pair(parameter, value);
    }
    check_variables(&whole, &pairs)?;
    if has_only_user {
        add_user(&mut whole, user);
    }
    let options: Result<PgConnectOptions, _> = whole.as_str().parse();
    let mut options = options.map_err(|error| invalid(&chain(&error)))?;
    if let Some(host) = options.get_host().strip_prefix('[') {
        let host = host.trim_end_matches(']').to_owned();
        options = options.host(&host);
    }
    // PgBouncer refuses a connection with this parameter, unless it is configured to ignore the
    // parameter. The fence uses no floating-point numbers.
    options = options.extra_float_digits(None);
    if options.get_application_name().is_none() {
        options = options.application_name(fallback_name.unwrap_or("tower-fence"));
    }
    let mode = tls_mode(options.get_ssl_mode(), mode.as_deref(), root_cert)?;
    if matches!(
        mode,
        PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull
    ) {
        check_files(&pairs)?;
    }
    Ok(options.ssl_mode(mode))
}

fn invalid(why: &str) -> Failure {
    Failure::configuration(format!("invalid database URL: {why}"))
}

const SEVERAL_HOSTS: &str = "it names several hosts, but only one is supported: name the primary, or an address that always points to it";

/// Checks the variables of libpq that apply unless the URL overrides them.
fn check_variables(url: &Url, pairs: &[(String, String)]) -> Result<(), Failure> {
    let is_given = |name: &str| pairs.iter().any(|(given, _)| given == name);
    // sqlx ignores invalid values of these variables, and then uses its defaults, which do not
    // require TLS, and which may lead to another server.
    if !is_given("sslmode")
        && !is_given("ssl-mode")
        && let Some(value) = variable("PGSSLMODE")?
        && value.parse::<PgSslMode>().is_err()
    {
        return Err(Failure::configuration(
            "PGSSLMODE must be disable, allow, prefer, require, verify-ca or verify-full",
        ));
    }
    if url.port().is_none()
        && !is_given("port")
        && let Some(value) = variable("PGPORT")?
        && value.parse::<u16>().is_err()
    {
        return Err(Failure::configuration(
            "PGPORT must be the number of a port",
        ));
    }
    for (name, parameter) in UNSUPPORTED {
        if !is_given(parameter)
            && let Some(value) = variable(name)?
            && let Treatment::Refused(instead) = treatment(parameter, &value)
        {
            return Err(Failure::configuration(format!(
                "the variable {name} is not supported with this value; {instead}"
            )));
        }
    }
    Ok(())
}

/// Adds a user, and the password after a colon, as parameters of the URL.
fn add_user(url: &mut Url, user: &str) {
    let (user, password) = user.split_once(':').unwrap_or((user, ""));
    let mut query = url
        .query()
        .map(|query| format!("{query}&"))
        .unwrap_or_default();
    for (parameter, value) in [("user", user), ("password", password)] {
        if !value.is_empty() {
            query.push_str(&format!("{parameter}={}&", value.replace('+', "%2B")));
        }
    }
    url.set_query(Some(query.trim_end_matches('&')));
}

/// Returns the TLS mode that libpq would use. `effective` is the mode according to sqlx. `given`
/// and `root_cert` are the parameters of the URL.
fn tls_mode(
    effective: PgSslMode,
    given: Option<&str>,
    root_cert: Option<&str>,
) -> Result<PgSslMode, Failure> {
    let of_variable = variable("PGSSLROOTCERT")?;
    // The parameter `sslrootcert=system` is not passed to sqlx, which would then use the
    // certificate that this variable names, even if the variable is empty or blank.
    if root_cert == Some(SYSTEM) && env::var_os("PGSSLROOTCERT").is_some() {
        return Err(invalid(
            "sslrootcert=system cannot be combined with the variable PGSSLROOTCERT",
        ));
    }
    match root_cert.or(of_variable.as_deref()) {
        Some(SYSTEM) if root_cert.is_none() => Err(invalid(
            "PGSSLROOTCERT cannot be `system`: put sslrootcert=system into the URL",
        )),
        Some(SYSTEM) if given.is_none_or(|mode| mode == "verify-full") => Ok(PgSslMode::VerifyFull),
        Some(SYSTEM) => Err(invalid("sslrootcert=system requires sslmode=verify-full")),
        // As in libpq, the mode `require` verifies the certificate if an authority is configured.
        Some(_) if matches!(effective, PgSslMode::Require) => Ok(PgSslMode::VerifyCa),
        _ => Ok(effective),
    }
}

/// Checks that the files that sqlx opens at each connection can be read.
fn check_files(pairs: &[(String, String)]) -> Result<(), Failure> {
    for (name, parameters) in FILES {
        let given = pairs
            .iter()
            .rfind(|(given, _)| parameters.contains(&&**given));
        let file = match given {
            Some((_, file)) => Some(file.clone()),
            // A variable may also have the contents of a file.
            None => variable(name)?.filter(|file| !file.contains("-----BEGIN")),
        };
        if let Some(file) = file.filter(|file| !file.is_empty() && file != SYSTEM) {
            let opened = File::open(&file);
            opened.map_err(|error| Failure::file("cannot read", Path::new(&file), error))?;
        }
    }
    Ok(())
}

/// The libpq name for the certificate authorities of the system.
const SYSTEM: &str = "system";

/// Variables of libpq that sqlx does not read, and the parameters with the same meaning. Without a
/// check, a requirement in such a variable would be ignored.
const UNSUPPORTED: [(&str, &str); 7] = [
    ("PGCHANNELBINDING", "channel_binding"),
    ("PGGSSENCMODE", "gssencmode"),
    ("PGREQUIREAUTH", "require_auth"),
    ("PGREQUIREPEER", "requirepeer"),
    ("PGSSLCRL", "sslcrl"),
    ("PGSSLCRLDIR", "sslcrldir"),
    ("PGSSLMINPROTOCOLVERSION", "ssl_min_protocol_version"),
];

/// Variables that name a file, and the parameters with the same meaning.
const FILES: [(&str, &[&str]); 3] = [
    ("PGSSLROOTCERT", &["sslrootcert", "ssl-root-cert", "ssl-ca"]),
    ("PGSSLCERT", &["sslcert", "ssl-cert"]),
    ("PGSSLKEY", &["sslkey", "ssl-key"]),
];

/// Returns the treatment of a parameter of libpq or of sqlx.
fn treatment(parameter: &str, value: &str) -> Treatment {
    use Treatment::{Honoured, Ignored, Refused};
    match parameter {
        "sslmode"
        | "ssl-mode"
        | "sslrootcert"
        | "ssl-root-cert"
        | "ssl-ca"
        | "sslcert"
        | "ssl-cert"
        | "sslkey"
        | "ssl-key"
        | "statement-cache-capacity"
        | "host"
        | "hostaddr"
        | "port"
        | "dbname"
        | "user"
        | "password"
        | "application_name"
        | "fallback_application_name"
        | "options" => Honoured,
        _ if parameter.starts_with("options[") => Honoured,
        "connect_timeout"
        | "keepalives"
        | "keepalives_idle"
        | "keepalives_interval"
        | "keepalives_count"
        | "tcp_user_timeout"
        | "client_encoding"
        | "sslsni"
        | "sslcompression"
        | "sslkeylogfile"
        | "load_balance_hosts"
        | "krbsrvname"
        | "gsslib"
        | "gssdelegation"
        | "min_protocol_version"
        | "max_protocol_version" => Ignored,
        "channel_binding" if value != "require" => Ignored,
        "channel_binding" => Refused("use sslmode=verify-full"),
        "gssencmode" if value != "require" => Ignored,
        "gssencmode" => Refused("use TLS: sslmode=verify-full"),
        // `/readyz` already reports a database that refuses writes.
        "target_session_attrs" if !matches!(value, "read-only" | "standby") => Ignored,
        "target_session_attrs" => Refused("the fence needs write access: name the primary"),
        "ssl_min_protocol_version" if value != "TLSv1.3" => Ignored,
        "ssl_min_protocol_version" => Refused("set it in the server's configuration"),
        "ssl_max_protocol_version" if value == "TLSv1.3" || value.is_empty() => Ignored,
        "ssl_max_protocol_version" => Refused("set it in the server's configuration"),
        "sslnegotiation" if value != "direct" => Ignored,
        "sslnegotiation" => Refused("omit it: the server must accept the usual negotiation"),
        "sslcertmode" if value == "allow" => Ignored,
        "sslcertmode" => Refused("name a client certificate in sslcert and sslkey, or omit both"),
        "sslcrl" | "sslcrldir" => Refused(
            "revoked certificates are not detected: name your own certificate authority in sslrootcert",
        ),
        "sslpassword" => Refused("use a key without a passphrase"),
        "requiressl" | "ssl" => Refused("use sslmode=require, or verify-full"),
        "passfile" => Refused("name the file in the variable PGPASSFILE"),
        "service" | "servicefile" => Refused("put the host, the user and the database in the URL"),
        "require_auth" => {
            Refused("require it in pg_hba.conf on the server, and use sslmode=verify-full")
        }
        "requirepeer" => Refused("use a socket in a directory that only the server may write to"),
        _ => Refused(
            "the supported parameters are sslmode, sslrootcert, sslcert, sslkey, host, port, dbname, user, password, application_name and options",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn urls_that_psql_accepts_are_read_alike() {
        let read = |url: &str| options(url).unwrap_or_else(|error| panic!("{url}: {error:?}"));
        let v6 = read("postgres://me:p%2Bw@[::1]:7/shop?connect_timeout=3&application_name=till");
        assert_eq!((v6.get_host(), v6.get_port()), ("::1", 7));
        assert_eq!(v6.get_application_name(), Some("till"));
        let socket = read("postgresql://me%40x@/shop?host=/run/pg&keepalives=1");
        assert_eq!(socket.get_socket(), Some(&PathBuf::from("/run/pg")));
        assert_eq!(socket.get_username(), "me@x");
        assert_eq!(socket.get_database(), Some("shop"));
        assert_eq!(socket.get_application_name(), Some("tower-fence"));
        let fallback = read("postgres://db/shop?fallback_application_name=till");
        assert_eq!(fallback.get_application_name(), Some("till"));
    }

    #[test]
    fn certificates_are_verified_when_libpq_verifies_them() {
        let mode = |query: &str| {
            let url = format!("postgres://db/shop?{query}");
            options(&url).map(|options| options.get_ssl_mode())
        };
        for (query, expected) in [
            ("sslmode=require", PgSslMode::Require),
            (
                "sslmode=require&sslrootcert=Cargo.toml",
                PgSslMode::VerifyCa,
            ),
            (
                "sslrootcert=Cargo.toml&sslmode=require",
                PgSslMode::VerifyCa,
            ),
            ("sslmode=prefer&sslrootcert=a.pem", PgSslMode::Prefer),
            ("sslmode=disable&sslrootcert=a.pem", PgSslMode::Disable),
            (
                "sslmode=verify-full&sslrootcert=Cargo.toml",
                PgSslMode::VerifyFull,
            ),
            ("sslrootcert=system", PgSslMode::VerifyFull),
        ] {
            let found = mode(query).unwrap();
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{query}");
        }
        assert!(mode("sslrootcert=system&sslmode=require").is_err());
    }

    #[test]
    fn each_parameter_that_is_refused_is_named() {
        for (query, name) in [
            ("channel_binding=require", "channel_binding"),
            ("target_session_attrs=standby", "target_session_attrs"),
            ("passfile=hunter2", "passfile"),
            ("service=hunter2", "service"),
            (
                "ssl_min_protocol_version=TLSv1.3",
                "ssl_min_protocol_version",
            ),
            ("pgbouncer=hunter2", "pgbouncer"),
        ] {
            let refused = options(&format!("postgres://me:hunter2@db/shop?{query}")).unwrap_err();
            assert!(refused.text.contains(name), "{}", refused.text);
            assert!(!refused.text.contains("hunter2"), "{}", refused.text);
        }
        for url in [
            "postgres://me:hunter2@a,b/shop",
            "postgres://me:hunter2@a:1,b:2/shop",
            "postgres:///shop?host=a,b",
            "postgres://a/shop?port=1,2",
        ] {
            let refused = options(url).unwrap_err();
            assert!(refused.text.contains("several hosts"), "{}", refused.text);
        }
    }
}
