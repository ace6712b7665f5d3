//! The Debian package: built from the program under test, installed into its own root folder, and
//! purged.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::json;
use sqlx::Postgres;
use tempfile::TempDir;

use super::program::{OPERATOR, Served, clean, ended, file, name, path, words};
use crate::support::{database::TestDatabase, process::built, repository, version};

fn output(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    let output = command.args(arguments).current_dir(repository()).output();
    output.unwrap_or_else(|error| panic!("{program}: {error}: use tests/run"))
}

/// Runs a program that must succeed. Returns its output.
#[track_caller]
pub(super) fn done(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let success = output.status.success();
    assert!(success, "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Builds the package with the program in `target/debug`, or in the folder of another profile.
fn build(folder: &Path) -> PathBuf {
    let program = built("tower-fence");
    let profile = match name(program.parent().unwrap().file_name().unwrap().as_ref()) {
        "debug" => "dev",
        profile => profile,
    }
    .to_owned();
    let deb = folder.join("tower-fence.deb");
    let beside = name(program.parent().unwrap()).to_owned();
    done(name(&program), &["generate", &beside]);
    let options = words("deb -p tower-fence-server --no-build --fast --strip --no-dbgsym");
    let more = ["--profile", &profile, "--output", name(&deb)];
    done("cargo", &[&options[..], &more].concat());
    deb
}

/// An overlay of the root file system. Its changes are in this folder until the value is dropped.
pub(super) struct Root(TempDir);

impl Root {
    pub(super) fn mount() -> Self {
        let root = Self(tempfile::tempdir().unwrap());
        let [upper, work, path] = ["upper", "work", "root"].map(|name| root.0.path().join(name));
        for folder in [&upper, &work, &path] {
            fs::create_dir(folder).unwrap();
        }
        let layers = format!(
            "lowerdir=/,upperdir={},workdir={}",
            name(&upper),
            name(&work)
        );
        let overlay = ["-t", "overlay", "overlay", "-o", &layers, name(&path)];
        done("mount", &overlay);
        root
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.0.path().join("root").join(path)
    }

    fn run(&self, command: &[&str]) -> String {
        done("chroot", &[&[name(&self.path(""))], command].concat())
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let unmounted = output("umount", &[name(&self.path(""))]);
        let success = unmounted.status.success();
        assert!(success || std::thread::panicking(), "{unmounted:?}");
    }
}

#[tokio::test]
async fn the_package_is_installed_runs_and_is_purged() {
    let folder = tempfile::tempdir().unwrap();
    let deb = build(folder.path());
    let control = done("dpkg-deb", &["--field", name(&deb)]);
    // cargo-deb moves the end of a long synopsis to another line.
    let synopsis = " leases with fencing tokens over HTTP, and its tools\n";
    for line in [
        "Package: tower-fence\n",
        "Section: net\n",
        "libc6",
        synopsis,
    ] {
        assert_contains!(control, line);
    }
    // The tables must be updated before the new program starts.
    let script = |name_of: &str| done("dpkg-deb", &["--info", name(&deb), name_of]);
    let (after, before) = (script("postinst"), script("prerm"));
    assert!(!after.contains("deb-systemd-invoke"), "{after}");
    let stops = "[ \"$1\" = remove ]; then\n\tdeb-systemd-invoke stop";
    assert_contains!(before, stops);
    let conffiles = done("dpkg-deb", &["--info", name(&deb), "conffiles"]);
    assert_contains!(conffiles, "/etc/tower-fence/tower-fence.env");

    let root = Root::mount();
    fs::copy(&deb, root.path("tower-fence.deb")).unwrap();
    root.run(&["dpkg", "--install", "/tower-fence.deb"]);
    let secrets = root.path("etc/tower-fence/secrets");
    let mode = fs::metadata(&secrets).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let url = "postgres://me:hunter2@db/shop";
    fs::write(secrets.join("database-url"), url).unwrap();
    let program = root.path("usr/bin/tower-fence");
    let mut asked = clean(Command::new(&program));
    asked.arg("--version");
    let printed = ended(asked).await;
    assert_eq!(printed.is(0).stdout, format!("tower-fence {}\n", version()));
    for installed in [
        "doc/tower-fence/CHANGELOG.md",
        "doc/tower-fence/LICENSE-APACHE",
        "doc/tower-fence/LICENSE-MIT",
        // These files are compressed in a package that is built without `--fast`.
        "man/man1/tower-fence.1",
        "man/man1/tower-fence-serve.1",
        "bash-completion/completions/tower-fence",
        "zsh/vendor-completions/_tower-fence",
        "fish/vendor_completions.d/tower-fence.fish",
    ] {
        let file = root.path("usr/share").join(installed);
        assert!(file.exists(), "{installed} is missing");
    }
    let copyright = fs::read_to_string(root.path("usr/share/doc/tower-fence/copyright")).unwrap();
    assert_contains!(copyright, "Copyright: 2026 The tower-fence contributors\n");

    // The program starts like the service: with the variables of its file, and with the secrets
    // from the files that these variables name.
    let db = Postgres::fresh(2).await;
    let (database, operators) = (file(&db.url), file(OPERATOR));
    let settings = fs::read_to_string(root.path("etc/tower-fence/tower-fence.env")).unwrap();
    let mut serve = clean(Command::new(&program));
    let variables = settings.lines().filter_map(|line| line.split_once('='));
    serve.envs(variables.filter(|(variable, _)| variable.starts_with("TOWER_FENCE_")));
    serve
        .arg("serve")
        .env("TOWER_FENCE_LISTEN", "127.0.0.1:0")
        .env("TOWER_FENCE_DATABASE_URL_FILE", path(&database))
        .env("TOWER_FENCE_OPERATOR_SECRETS_FILE", path(&operators));
    let mut server = Served::of(serve).await.with_secret(OPERATOR);
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    server.signal("-TERM");
    assert!(server.exit().await.success());

    let units = ["usr/lib/systemd/system", "lib/systemd/system"];
    let units = units.map(|folder| format!("{folder}/tower-fence.service"));
    let unit = units.iter().find(|unit| root.path(unit).exists());
    let unit = root.path(unit.expect("the package contains no unit"));
    verify(&unit, &program, folder.path());

    root.run(&["dpkg", "--remove", "tower-fence"]);
    assert!(secrets.join("database-url").exists());
    root.run(&["dpkg", "--purge", "tower-fence"]);
    for left in [&program, &root.path("etc/tower-fence"), &unit] {
        assert!(!left.exists(), "{} was left", left.display());
    }
}

/// Checks the unit with systemd.
fn verify(unit: &Path, program: &Path, folder: &Path) {
    let text = fs::read_to_string(unit).unwrap();
    assert_contains!(text, "ExecStart=/usr/bin/tower-fence serve\n");
    let copy = folder.join("tower-fence.service");
    fs::write(&copy, text.replace("/usr/bin/tower-fence", name(program))).unwrap();
    let verified = output("systemd-analyze", &["verify", "--man=no", name(&copy)]);
    let said = String::from_utf8_lossy(&verified.stderr);
    assert!(verified.status.success(), "{said}");
    assert!(!said.contains("tower-fence.service"), "{said}");
    // systemd reports a setting that it does not support.
    fs::write(&copy, text.replace("PrivateTmp", "PrivateTemp")).unwrap();
    let wrong = output("systemd-analyze", &["verify", "--man=no", name(&copy)]);
    assert_contains!(String::from_utf8_lossy(&wrong.stderr), "PrivateTemp");
}
