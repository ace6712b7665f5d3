//! Copies the sources of the crate, and adapts them for compilation against the model. Each file
//! uses the names of the model in place of `std`, `tokio` and `sqlx`. Private items become visible
//! to the scenarios, and switches select the broken variants.

#[allow(dead_code, reason = "only the list is for here")]
#[path = "src/mutants.rs"]
mod mutants;

use std::{env, error::Error, fs, path::Path};

use mutants::MUTANTS;

/// Polling intervals: file, constant, and value in seconds. The build replaces each value with one
/// so long that no waiter polls. A waiter that is not woken then waits forever.
const POLLS: [(&str, &str, u64); 2] = [
    ("lease/driver/queue.rs", "LONGEST_SLEEP", 10),
    ("lease/postgres/listener.rs", "POLL_INTERVAL", 2),
];

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let (sources, output) = (Path::new("../../../src"), env::var("OUT_DIR")?);
    println!("cargo::rerun-if-changed=../../../src");
    println!("cargo::rerun-if-changed=src/root.rs");
    println!("cargo::rerun-if-changed=src/mutants.rs");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(docsrs, fuzzing, feature, values(any()))");
    for feature in ["client", "memory"] {
        println!("cargo::rustc-cfg=feature=\"{feature}\"");
    }
    let output = Path::new(&output).join("src");
    // An earlier build may have left files that have since been renamed.
    if output.exists() {
        fs::remove_dir_all(&output)?;
    }
    for (file, ..) in POLLS {
        fs::metadata(sources.join(file)).map_err(|error| format!("{file}: {error}"))?;
    }
    copy_folder(sources, &output, "")?;
    fs::copy("src/root.rs", output.join("root.rs"))?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path, name: &str) -> Outcome {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let (to, name) = (to.join(&*file), format!("{name}{file}"));
        if path.is_dir() {
            copy_folder(&path, &to, &format!("{name}/"))?;
        } else if file.ends_with(".rs") {
            fs::write(to, adapt(&name, &fs::read_to_string(path)?)?)?;
        }
    }
    Ok(())
}

fn adapt(name: &str, text: &str) -> Result<String, Box<dyn Error>> {
    let mut text = text.to_owned();
    for mutant in MUTANTS.iter().filter(|mutant| mutant.file == name) {
        if text.matches(mutant.code).count() != 1 {
            return Err(format!("{name} must contain this exactly once: {}", mutant.code).into());
        }
        let is_on = format!("crate::mutants::is_on({:?})", mutant.name);
        let both = match mutant.broken.contains("IS_ON") {
            true => mutant.broken.replace("IS_ON", &is_on),
            false => format!(
                "if {is_on} {{ {} }} else {{ {} }}",
                mutant.broken, mutant.code
            ),
        };
        text = text.replace(mutant.code, &both);
    }
    // The unit tests of the copied files run in the crate itself.
    for of_tests in ["(test)", "(all(test, ", "any(test, fuzzing)"] {
        text = text.replace(of_tests, &of_tests.replace("test", "any()"));
    }
    for narrow in [
        "pub(super) ",
        "pub(crate) ",
        "pub(in crate::fence) ",
        "pub(in crate::lease) ",
    ] {
        text = text.replace(narrow, "pub ");
    }
    for (private, public) in [
        ("\nmod ", "\npub mod "),
        ("\n    fn lock(", "\n    pub fn lock("),
    ] {
        text = text.replace(private, public);
    }
    for (_, constant, seconds) in POLLS.iter().filter(|(file, ..)| *file == name) {
        let shipped = format!("{constant}: Duration = Duration::from_secs({seconds});");
        if text.matches(&shipped).count() != 1 {
            return Err(format!("{name} must contain this exactly once: {shipped}").into());
        }
        let never = format!("{constant}: Duration = Duration::from_secs(1 << 30);");
        text = text.replace(&shipped, &never);
    }
    // Inner attributes must precede the inserted import, so they become comments.
    text = format!("\n{text}").replace("\n#![", "\n// #![");
    text.remove(0);
    let documentation = text.lines().take_while(|line| line.starts_with("//!"));
    let length: usize = documentation.map(|line| line.len() + 1).sum();
    text.insert_str(length, "use crate::model::{std, tokio};\n");
    for (folder, name_of_it) in [
        ("fence/", "sqlx"),
        ("lease/postgres/", "sqlx"),
        ("lease/redis/", "redis"),
    ] {
        if name.starts_with(folder) {
            text.insert_str(length, &format!("use crate::model::{name_of_it};\n"));
        }
    }
    Ok(text)
}
