//! The Debian package: built from the program that the tests have, installed, and removed again.
//!
//! Where the tests run as root, and no tower-fence is installed, the system's `dpkg` installs it. Otherwise it is
//! unpacked into a folder.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::json;
use sqlx::Postgres;
use tempfile::TempDir;

use super::program::{OPERATOR, Served, clean, ended, file, name, path};
use crate::support::database::TestDatabase;

fn output(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    let output = command
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    output.unwrap_or_else(|error| panic!("{program}: {error}: use tests/run"))
}

/// What a program that succeeds has printed.
#[track_caller]
fn done(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// The package, of the program that stands in `target/debug`, or in another profile's folder.
fn build(folder: &Path) -> PathBuf {
    let path = option_env!("CARGO_BIN_EXE_tower-fence");
    let program = Path::new(path.expect("the feature server is off"));
    let profile = match name(program.parent().unwrap().file_name().unwrap().as_ref()) {
        "debug" => "dev",
        profile => profile,
    }
    .to_owned();
    let deb = folder.join("tower-fence.deb");
    let arguments = [
        "deb",
        "--no-build",
        "--fast",
        "--strip",
        "--no-dbgsym",
        "--profile",
        &profile,
    ];
    done(
        "cargo",
        &[&arguments[..], &["--output", name(&deb)]].concat(),
    );
    deb
}

/// Where the package is installed, until this is dropped.
enum Installed {
    BySystem,
    Unpacked(TempDir),
}

impl Installed {
    fn install(deb: &Path) -> Self {
        let is_root = done("id", &["-u"]).trim() == "0";
        let is_there = output("dpkg", &["-s", "tower-fence"]).status.success();
        if is_root && !is_there && !Path::new("/usr/bin/tower-fence").exists() {
            let installed = Self::BySystem;
            done("dpkg", &["--install", name(deb)]);
            return installed;
        }
        let folder = tempfile::tempdir().unwrap();
        println!("unpacked and not installed: no root, or there is a tower-fence already");
        done("dpkg-deb", &["--extract", name(deb), name(folder.path())]);
        Self::Unpacked(folder)
    }

    fn path(&self, path: &str) -> PathBuf {
        match self {
            Self::BySystem => Path::new("/").join(path),
            Self::Unpacked(folder) => folder.path().join(path),
        }
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        if matches!(self, Self::BySystem) {
            let purged = output("dpkg", &["--purge", "tower-fence"]);
            assert!(
                purged.status.success() || std::thread::panicking(),
                "{purged:?}"
            );
        }
    }
}

#[tokio::test]
async fn the_deb_is_installed_runs_and_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let deb = build(folder.path());
    let control = done("dpkg-deb", &["--field", name(&deb)]);
    for line in ["Package: tower-fence\n", "Section: net\n", "libc6"] {
        assert!(control.contains(line), "{line}: {control}");
    }
    let conffiles = done("dpkg-deb", &["--info", name(&deb), "conffiles"]);
    assert!(
        conffiles.contains("/etc/tower-fence/tower-fence.env"),
        "{conffiles}"
    );

    let installed = Installed::install(&deb);
    let program = installed.path("usr/bin/tower-fence");
    let mut version = clean(Command::new(&program));
    version.arg("--version");
    let version = ended(version).await;
    assert_eq!(
        version.is(0).stdout,
        format!("tower-fence {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert!(
        installed
            .path("usr/share/doc/tower-fence/README.md")
            .exists()
    );

    // As the service starts it: with the variables of its file, and secrets from where the file says.
    let db = Postgres::fresh(2).await;
    let (database, operators) = (file(&db.url), file(OPERATOR));
    let settings = fs::read_to_string(installed.path("etc/tower-fence/tower-fence.env")).unwrap();
    let mut serve = clean(Command::new(&program));
    for line in settings
        .lines()
        .filter(|line| line.starts_with("TOWER_FENCE_"))
    {
        let (variable, value) = line.split_once('=').unwrap();
        serve.env(variable, value);
    }
    serve
        .arg("serve")
        .env("TOWER_FENCE_LISTEN", "127.0.0.1:0")
        .env("TOWER_FENCE_DATABASE_URL_FILE", path(&database))
        .env("TOWER_FENCE_OPERATOR_SECRETS_FILE", path(&operators));
    let mut server = Served::of(serve).await.with_secret(OPERATOR);
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    server.signal("-TERM");
    assert!(server.exit().await.success());

    let unit = installed.path("usr/lib/systemd/system/tower-fence.service");
    let unit = [
        unit,
        installed.path("lib/systemd/system/tower-fence.service"),
    ]
    .into_iter()
    .find(|unit| unit.exists())
    .expect("no unit in the package");
    verify(&unit, &program, folder.path());

    let was_installed = matches!(installed, Installed::BySystem);
    drop(installed);
    if was_installed {
        for left in ["/usr/bin/tower-fence", "/etc/tower-fence", name(&unit)] {
            assert!(!Path::new(left).exists(), "{left} was left");
        }
    }
}

/// Has systemd look at the unit, where systemd is.
fn verify(unit: &Path, program: &Path, folder: &Path) {
    let text = fs::read_to_string(unit).unwrap();
    assert!(
        text.contains("ExecStart=/usr/bin/tower-fence serve\n"),
        "{text}"
    );
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        println!("the unit was not verified: there is no systemd-analyze");
        return;
    }
    let copy = folder.join("tower-fence.service");
    fs::write(&copy, text.replace("/usr/bin/tower-fence", name(program))).unwrap();
    let verified = output("systemd-analyze", &["verify", "--man=no", name(&copy)]);
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    assert!(
        verified.status.success() && !said.contains("tower-fence.service"),
        "{said}"
    );
    // A setting that systemd does not know is found.
    fs::write(&copy, text.replace("PrivateTmp", "PrivateTemp")).unwrap();
    let wrong = output("systemd-analyze", &["verify", "--man=no", name(&copy)]);
    assert!(
        String::from_utf8_lossy(&wrong.stderr).contains("PrivateTemp"),
        "{wrong:?}"
    );
}
