//! The settings file of `serve`, and the command `config`, which prints the effective settings.
//!
//! 1. A setting in the file has the name of its option: `listen = "0.0.0.0:4120"`.
//! 2. An option on the command line or in the environment overrides the setting in the file.
//! 3. Neither the file nor the output contains a secret. Instead, a setting names the file that
//!    contains the secret.

use std::{
    any::TypeId,
    env,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

use clap::{Arg, ArgAction, ArgMatches, parser::ValueSource};
use toml::{Table, Value};

use crate::{
    failure::Failure,
    operate::print as print_text,
    secrets::{has_password, split_urls},
};

/// Returns the settings of a file as arguments of the command line. Omits the settings that the
/// command line or the environment overrides.
pub fn arguments_of(
    file: &Path,
    command: &clap::Command,
    given: &ArgMatches,
) -> Result<Vec<OsString>, Failure> {
    let text = fs::read_to_string(file);
    let text = text.map_err(|error| Failure::file("cannot read", file, error))?;
    let invalid = |error: String| Failure::file("cannot use", file, error);
    // The `Display` form of the error quotes the line, which may contain a misplaced secret. The
    // message alone does not quote it.
    let settings: Table = text.parse().map_err(|error: toml::de::Error| {
        let at = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count();
        invalid(format!(
            "line {line} is not valid TOML: {}",
            error.message()
        ))
    })?;
    let mut found = vec![];
    for (name, value) in &settings {
        let option = command
            .get_opts()
            .find(|option| option.get_long() == Some(name) && name != "config")
            .ok_or_else(|| invalid(format!("unknown option --{name}")))?;
        let argument = argument(name, option, value).map_err(invalid)?;
        if !is_given(name, command, given) {
            found.extend(argument);
        }
    }
    Ok(found)
}

/// Returns the argument that sets the option to this value; `None` for a flag that is false.
fn argument(name: &str, option: &Arg, value: &Value) -> Result<Option<OsString>, String> {
    let is_flag = matches!(option.get_action(), ArgAction::SetTrue);
    let value = match value {
        Value::Boolean(is_set) if is_flag => return Ok(is_set.then(|| format!("--{name}").into())),
        _ if is_flag => return Err(format!("{name} must be true or false")),
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Boolean(is_set) => is_set.to_string(),
        _ => return Err(format!("{name} must be a string or a whole number")),
    };
    if name.ends_with("-url") && split_urls(&value).any(has_password) {
        return Err(format!(
            "{name} contains a password: put the URL in a file, and name that file in {name}-file"
        ));
    }
    Ok(Some(format!("--{name}={value}").into()))
}

/// Returns whether the command line or the environment contains the setting or, for a secret, its
/// alternative. The names of the two differ only in the suffix `-file`.
fn is_given(name: &str, command: &clap::Command, given: &ArgMatches) -> bool {
    let base = name.strip_suffix("-file").unwrap_or(name);
    let names = match is_secret(&variable(base)) {
        true => vec![base.to_owned(), format!("{base}-file")],
        false => vec![name.to_owned()],
    };
    names.iter().any(|name| {
        let option = command
            .get_opts()
            .find(|option| option.get_long() == Some(name));
        let source = option.and_then(|option| given.value_source(option.get_id().as_str()));
        source == Some(ValueSource::CommandLine) || is_set(&variable(name))
    })
}

/// Returns whether a variable has a value that is not blank.
fn is_set(variable: &str) -> bool {
    env::var_os(variable).is_some_and(|value| !is_blank(&value))
}

/// Returns whether the value of a variable consists of blanks. Such a variable counts as missing,
/// as it does for a `Secret`.
pub fn is_blank(value: &OsStr) -> bool {
    value.to_str().is_some_and(|text| text.trim().is_empty())
}

/// Returns the names of variables that begin like settings, but are not settings of any command.
/// Such a name is probably misspelt. Omits the variables that Kubernetes sets for a service whose
/// name begins with `tower-fence`.
pub fn unknown_variables(program: &clap::Command) -> Vec<String> {
    let options = program.get_subcommands().flat_map(clap::Command::get_opts);
    let known: Vec<_> = options
        .filter_map(|option| option.get_env()?.to_str())
        .collect();
    let is_known = |name: &str| {
        known.contains(&name) || (is_secret(name) && known.contains(&&*format!("{name}_FILE")))
    };
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let names: Vec<_> = names
        .filter(|name| name.starts_with("TOWER_FENCE_"))
        .collect();
    let services = names
        .iter()
        .filter_map(|name| name.strip_suffix("_SERVICE_HOST"));
    let services: Vec<_> = services.collect();
    let is_of_service = |name: &str| {
        let mut rests = services
            .iter()
            .filter_map(|service| name.strip_prefix(service));
        // Docker sets only the variables of the port.
        name.starts_with("TOWER_FENCE_PORT")
            || rests.any(|rest| rest.starts_with("_SERVICE_") || rest.starts_with("_PORT"))
    };
    let unknown = names
        .iter()
        .filter(|name| !is_known(name) && !is_of_service(name));
    let mut unknown: Vec<_> = unknown.cloned().collect();
    unknown.sort_unstable();
    unknown
}

/// Returns the name of the environment variable of an option.
fn variable(name: &str) -> String {
    format!("TOWER_FENCE_{}", name.to_uppercase().replace('-', "_"))
}

/// Suffixes of the variables that contain secrets. Certificates and their keys are read only from
/// files.
const SECRETS: [&str; 5] = ["_URL", "_SECRET", "_SECRETS", "_PASSWORD", "_TOKEN_KEY"];

/// Returns whether a secret is read from the variable `name`, or from the file that `name` with the
/// suffix `_FILE` names.
fn is_secret(name: &str) -> bool {
    SECRETS.iter().any(|end| name.ends_with(end))
}

/// Prints the effective settings. `of_file` contains the arguments that the settings file has
/// added.
pub fn print(
    command: &clap::Command,
    given: &ArgMatches,
    of_file: &[OsString],
) -> Result<u8, Failure> {
    let mut text = String::new();
    for option in command.get_opts() {
        let (id, Some(name)) = (option.get_id().as_str(), option.get_long()) else {
            continue;
        };
        if name == "config" {
            continue;
        }
        let (Some(value), Some(source)) = (value(option, given), given.value_source(id)) else {
            continue;
        };
        let is_of_file = of_file.iter().any(|argument| {
            let argument = argument.to_string_lossy();
            let option = argument.split('=').next().unwrap_or_default();
            option.strip_prefix("--") == Some(name)
        });
        let origin = match source {
            _ if is_of_file => "file",
            ValueSource::CommandLine => "command line",
            ValueSource::EnvVariable => "environment",
            _ => "default",
        };
        if name.ends_with("-url")
            && value
                .as_str()
                .is_some_and(|urls| split_urls(urls).any(has_password))
        {
            text.push_str(&format!("# {name} is set and not shown\n"));
            continue;
        }
        text.push_str(&format!("{name} = {value}  # {origin}\n"));
    }
    let files = command.get_opts().filter_map(Arg::get_env);
    let names = files.filter_map(|name| name.to_str()?.strip_suffix("_FILE"));
    let secrets = names.filter(|name| is_secret(name));
    let mut set: Vec<&str> = secrets.filter(|name| is_set(name)).collect();
    let has_option = ["database_url", "database_url_file"]
        .iter()
        .any(|option| given.value_source(option).is_some());
    let has_url = has_option || set.contains(&"TOWER_FENCE_DATABASE_URL");
    if !has_url && is_set("DATABASE_URL") {
        set.push("DATABASE_URL");
    }
    for name in set {
        text.push_str(&format!(
            "# {name} is set in the environment and not shown\n"
        ));
    }
    print_text(&text)
}

/// Returns the value of an option as TOML; `None` if it has no value.
fn value(option: &Arg, given: &ArgMatches) -> Option<Value> {
    let id = option.get_id().as_str();
    if matches!(option.get_action(), ArgAction::SetTrue) {
        return Some(given.get_flag(id).into());
    }
    let text = given.get_raw(id)?.next()?.to_string_lossy().into_owned();
    // Otherwise a text such as `007` or `true` would be printed as a number or a flag.
    let of_value = option.get_value_parser().type_id();
    let is_text = of_value == TypeId::of::<String>() || of_value == TypeId::of::<PathBuf>();
    Some(match (text.parse::<i64>(), text.parse::<bool>()) {
        _ if is_text => text.into(),
        (Ok(number), _) => number.into(),
        (_, Ok(is_set)) => is_set.into(),
        _ => text.into(),
    })
}
