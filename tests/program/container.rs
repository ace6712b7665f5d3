//! The container recipe, without a container engine: the program runs as in the last stage of the
//! Dockerfile and the compose file, in its own root folder.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    process::Command,
};

use serde_json::json;
use sqlx::Postgres;

use super::{
    package::{Root, done},
    program::{HOLDER, OPERATOR, Served, ended, name},
};
use crate::support::{database::TestDatabase, process::built, repository};

const DOCKERFILE: &str = include_str!("../../crates/server/packaging/Dockerfile");
const COMPOSE: &str = include_str!("../../crates/server/packaging/compose.yaml");

/// Returns the arguments of an instruction of the last stage.
fn instruction(name: &str) -> &'static str {
    let (_, stage) = DOCKERFILE.rsplit_once("\nFROM ").unwrap();
    let mut lines = stage.lines();
    let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}")).trim()
}

/// Returns the words of an instruction in the JSON form.
fn words(instruction: &str) -> Vec<String> {
    serde_json::from_str(instruction).unwrap()
}

/// Returns the variables that the compose file sets.
fn variables() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = COMPOSE.lines().map(str::trim);
    let settings = lines.filter(|line| line.starts_with("TOWER_FENCE_"));
    settings.map(|line| {
        let (name, value) = line.split_once(": ").unwrap();
        (name, value.trim_matches('"'))
    })
}

#[tokio::test]
async fn the_container_serves_and_checks_as_an_unprivileged_user() {
    let (db, root) = (Postgres::fresh(2).await, Root::mount());
    let (_, program) = instruction("COPY --from=build").rsplit_once(' ').unwrap();
    let program = program.trim_start_matches('/');
    fs::copy(built("tower-fence"), root.path(program)).unwrap();
    let user = instruction("USER");
    let id = user.split(':').next().unwrap().parse().unwrap();
    let secrets = root.path("run/secrets");
    fs::create_dir_all(&secrets).unwrap();
    for (file, text) in [
        ("database-url", db.url.as_str()),
        ("holders", HOLDER),
        ("operators", OPERATOR),
    ] {
        let path = secrets.join(file);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        chown(&path, Some(id), Some(id)).unwrap();
    }
    let run = |words: &[String]| {
        let mut command = Command::new("chroot");
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .envs(variables())
            .env("TOWER_FENCE_LISTEN", "0.0.0.0:0")
            .args(["--userspec", user, name(&root.path(""))])
            .args(words);
        command
    };
    let serve = [words(instruction("ENTRYPOINT")), words(instruction("CMD"))].concat();
    let mut server = Served::of(run(&serve)).await.with_secret(HOLDER);
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    let check = [words(instruction("ENTRYPOINT")), vec!["check".into()]].concat();
    ended(run(&check)).await.is(0);
    fs::remove_file(secrets.join("database-url")).unwrap();
    ended(run(&check)).await.is(78);
    server.signal("-TERM");
    assert!(server.exit().await.success());
}

#[test]
fn the_recipe_agrees_with_the_workspace_and_the_page() {
    let build = "RUN cargo build --locked --release -p tower-fence-server\n";
    assert!(DOCKERFILE.contains(build));
    let source = instruction("COPY --from=build").split(' ').next().unwrap();
    assert_eq!(source, "/src/target/release/tower-fence");
    // With a health check, Docker Swarm would replace all servers if a store failed. A container
    // that executes `run` has no database to check.
    assert!(!DOCKERFILE.contains("HEALTHCHECK"));
    let page = include_str!("../../src/server.md");
    let (user, _) = instruction("USER").split_once(':').unwrap();
    // On many hosts, this id is that of `nobody`, which could then read the secrets.
    assert_ne!(user, "65534");
    for text in [page, DOCKERFILE] {
        assert!(text.contains(&format!("sudo chown -R {user} secrets")));
    }
    assert!(page.contains(&format!("```yaml\n{COMPOSE}```\n")));
    // With `on-failure`, the services would not run after a restart of the host.
    assert_eq!(COMPOSE.matches("    restart: unless-stopped\n").count(), 2);
    let ignored = fs::read_to_string(repository().join(".dockerignore")).unwrap();
    // The folder with the secrets is in the build context, and must not become part of the image.
    let (_, secret) = COMPOSE.split_once("{file: ./").unwrap();
    let (folder, _) = secret.split_once('/').unwrap();
    assert!(ignored.lines().any(|line| line == folder), "{ignored}");
    let paths: Vec<_> = ["ls-files"].into_iter().chain(ignored.lines()).collect();
    assert_eq!(done("git", &paths), "");
}
