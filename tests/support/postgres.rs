//! A Postgres server that a test can crash and restart.

use std::{
    collections::HashMap,
    env,
    fs::{self, File},
    net::SocketAddr,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak},
    time::Duration,
};

use sqlx::{Connection, PgConnection};
use tempfile::TempDir;

use super::{ports::free_port, process::try_signal};

/// A server with its own data folder, which runs until it is dropped. By default, the server
/// confirms a COMMIT only when the data is on disk.
pub struct PostgresServer {
    /// The folder of the server programs, which include `pgbench`.
    pub programs: PathBuf,
    folder: TempDir,
    port: u16,
    password: String,
    settings: Vec<String>,
    variables: Vec<(&'static str, String)>,
    child: Option<Child>,
    /// The server whose data folder was copied.
    template: Option<Arc<Self>>,
}

impl PostgresServer {
    /// Starts a server on a free port, with settings of the form `name=value`.
    pub async fn start(settings: &[&str]) -> Self {
        Self::start_with_files(&[], settings).await
    }

    /// Like [`start`](Self::start), with these files in the data folder, for example a certificate
    /// (`server.crt`, `server.key`) or the access rules (`pg_hba.conf`).
    pub async fn start_with_files(files: &[(&str, &[u8])], settings: &[&str]) -> Self {
        let programs = programs().expect("postgresql is not installed: use tests/run");
        Self::start_from(programs, 0, files, settings).await
    }

    /// Like [`start_with_files`](Self::start_with_files), with the server programs of this folder.
    /// Only servers of the same `kind` have the same system identifier.
    pub async fn start_from(
        programs: PathBuf,
        kind: usize,
        files: &[(&str, &[u8])],
        settings: &[&str],
    ) -> Self {
        Self::start_copy(Self::template(&programs, kind), files, settings).await
    }

    /// Like [`start_with_files`](Self::start_with_files), with a copy of the data of a server that
    /// is not running.
    pub async fn start_copy(
        template: Arc<Self>,
        files: &[(&str, &[u8])],
        settings: &[&str],
    ) -> Self {
        let (programs, password) = (template.programs.clone(), template.password.clone());
        let settings = settings.iter().map(|&setting| setting.into()).collect();
        let mut server = Self::in_new_folder(programs, password, settings);
        let data = template.folder.path().join("data");
        let copied = server
            .command(Path::new("cp"))
            .arg("-r")
            .arg(data)
            .arg("data")
            .status();
        assert!(copied.unwrap().success());
        server.template = Some(template);
        for (name, content) in files {
            server.write(&format!("data/{name}"), content);
        }
        server.start_on_a_free_port().await
    }

    /// Copies the data of this server with `pg_basebackup`, which connects to `addr` with the
    /// additional `options`. The copy has the settings of this server. It is not started.
    pub async fn copy(&self, addr: SocketAddr, options: &[&str]) -> Self {
        let programs = self.programs.clone();
        let copy = Self::in_new_folder(programs, self.password.clone(), self.settings.clone());
        let source = format!(
            "postgres://tests:{}@{addr}/?application_name=copy",
            self.password
        );
        let mut command = copy.program("pg_basebackup");
        command
            .args([
                "-D",
                "data",
                "-X",
                "stream",
                "--checkpoint=fast",
                "--no-sync",
            ])
            .args(["-d", &source])
            .args(options);
        // The runtime must not be blocked, because `addr` may be a proxy in this process.
        let copied = tokio::task::spawn_blocking(move || command.output());
        let copied = copied.await.unwrap().unwrap();
        assert!(copied.status.success(), "{copied:?}");
        copy
    }

    /// Makes a copy start like a server that is restored from an empty archive. The copy must have
    /// been created with `--write-recovery-conf`.
    pub fn restore_from_archive(&mut self) {
        let data = self.folder.path().join("data");
        let recovery = data.join("recovery.signal");
        fs::rename(data.join("standby.signal"), recovery).unwrap();
        self.settings.push("restore_command=false".into());
    }

    /// Starts a server whose data folder exists.
    pub async fn start_on_a_free_port(mut self) -> Self {
        for _ in 0..10 {
            self.port = free_port();
            if self.try_start().await {
                return self;
            }
        }
        panic!("postgres could not be started: {}", self.log());
    }

    fn in_new_folder(programs: PathBuf, password: String, settings: Vec<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        if let Some((user, group)) = unprivileged() {
            chown(folder.path(), Some(user), Some(group)).unwrap();
        }
        Self {
            programs,
            folder,
            port: 0,
            password,
            settings,
            variables: vec![],
            child: None,
            template: None,
        }
    }

    /// Returns a server that is never started. It is deleted together with its last copy.
    ///
    /// A copy of its data folder takes a tenth of the time of `initdb`.
    fn template(programs: &Path, kind: usize) -> Arc<Self> {
        type Templates = HashMap<(PathBuf, usize), Weak<PostgresServer>>;
        static TEMPLATES: LazyLock<Mutex<Templates>> = LazyLock::new(Mutex::default);
        let mut templates = TEMPLATES.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = templates.entry((programs.to_owned(), kind)).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let password = format!("{:032x}", rand::random::<u128>());
            let template = Arc::new(Self::in_new_folder(programs.to_owned(), password, vec![]));
            template.make_cluster();
            *entry = Arc::downgrade(&template);
            template
        })
    }

    pub fn id(&self) -> u32 {
        self.child.as_ref().expect("the server is not running").id()
    }

    pub fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Returns the URL of a database of this server. The database `postgres` always exists.
    pub fn url(&self, database: &str) -> String {
        let (password, port) = (&self.password, self.port);
        format!("postgres://tests:{password}@127.0.0.1:{port}/{database}")
    }

    /// Connects to the database `postgres`.
    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url("postgres")).await.unwrap()
    }

    /// Stops the server immediately, as a crash would. The server writes nothing else to disk.
    pub async fn crash(&mut self) {
        // Rarely, a server does not end although it has killed all of its processes.
        self.end(&["-QUIT", "-KILL"]).await;
    }

    /// Stops the server with a fast shutdown, which rolls transactions back.
    pub async fn stop(&mut self) {
        self.end(&["-INT"]).await;
    }

    /// Sets environment variables for the next start.
    pub fn set_variables(&mut self, variables: Vec<(&'static str, String)>) {
        self.variables = variables;
    }

    /// Starts the server again, on the same port and in the same folder.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "the server is already running");
        assert!(
            self.try_start().await,
            "postgres did not start again: {}",
            self.log()
        );
    }

    /// Writes a file that only the server may read.
    fn write(&self, name: &str, content: &[u8]) {
        let file = self.folder.path().join(name);
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        if let Some((user, group)) = unprivileged() {
            chown(&file, Some(user), Some(group)).unwrap();
        }
    }

    fn make_cluster(&self) {
        self.write("password", self.password.as_bytes());
        let made = self
            .program("initdb")
            .args(["-D", "data", "-U", "tests", "-E", "UTF8", "--locale=C"])
            .args(["-A", "scram-sha-256", "--pwfile", "password", "--no-sync"])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
    }

    async fn try_start(&mut self) -> bool {
        let path = self.folder.path().join("server.log");
        let log = File::options().create(true).append(true).open(path);
        let log = log.unwrap();
        let port = self.port.to_string();
        let mut command = self.program("postgres");
        command.args(["-D", "data", "-p", &port, "-h", "127.0.0.1", "-k", ""]);
        let durable = ["fsync=on", "synchronous_commit=on", "full_page_writes=on"];
        let settings = self.settings.iter().map(String::as_str);
        for setting in durable.into_iter().chain(settings) {
            command.args(["-c", setting]);
        }
        let variables = self.variables.iter();
        command.envs(variables.map(|(name, value)| (name, value)));
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
        // After a crash, the server first replays its log.
        for _ in 0..6_000 {
            if self.child.as_mut().unwrap().try_wait().unwrap().is_some() {
                self.child = None;
                return false;
            }
            if let Ok(conn) = PgConnection::connect(&self.url("postgres")).await {
                let _ = conn.close().await;
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }

    /// Sends the signals, one after the other, until the server has ended.
    async fn end(&mut self, signals: &[&str]) {
        let mut child = self.child.take().expect("the server is not running");
        for signal in signals {
            try_signal(child.id(), signal);
            for _ in 0..3_000 {
                if child.try_wait().unwrap().is_some() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        self.child = Some(child);
        panic!("postgres did not end: {}", self.log());
    }

    /// Returns a command for a program of Postgres, which runs in the folder and as the user of the
    /// server.
    pub fn program(&self, name: &str) -> Command {
        self.command(&self.programs.join(name))
    }

    /// Like [`program`](Self::program), for any program.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        // Removes the Postgres settings in the environment of the tests.
        for (variable, _) in env::vars_os() {
            if variable.to_string_lossy().starts_with("PG") {
                command.env_remove(variable);
            }
        }
        if let Some((user, group)) = unprivileged() {
            command.uid(user).gid(group);
        }
        command
    }

    pub fn log(&self) -> String {
        let log = fs::read(self.folder.path().join("server.log"));
        String::from_utf8_lossy(&log.unwrap_or_default()).into_owned()
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            try_signal(child.id(), "-QUIT");
            // The wait is bounded: if a child process hangs, the server kills it after five
            // seconds.
            let _ = child.wait();
        }
    }
}

/// Returns the folder of the programs of the newest installed Postgres. Debian does not have them
/// in the PATH.
pub fn programs() -> Option<PathBuf> {
    let versions = |folder: &str, prefix: &str| -> Vec<(u32, PathBuf)> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let versions = entries.filter_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        });
        versions.collect()
    };
    let mut found = versions("/usr/lib/postgresql", "");
    found.extend(versions("/usr", "pgsql-"));
    found.retain(|(_, programs)| programs.join("initdb").exists());
    let newest = found.into_iter().max().map(|(_, programs)| programs);
    newest.or_else(|| {
        let path = env::var_os("PATH")?;
        // `initdb` may be a link into the folder that has the other programs.
        let initdb = env::split_paths(&path).map(|folder| folder.join("initdb"));
        let initdb = initdb
            .filter_map(|initdb| initdb.canonicalize().ok())
            .next()?;
        initdb.parent().map(Path::to_owned)
    })
}

/// Returns the user and the group to run as, because Postgres and PgBouncer refuse to run as root.
/// Returns `None` if this process is not root.
pub fn unprivileged() -> Option<(u32, u32)> {
    let id = |arguments: &[&str]| -> Option<u32> {
        let output = Command::new("id").args(arguments).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    if id(&["-u"]) != Some(0) {
        return None;
    }
    let of = |user| Some((id(&["-u", user])?, id(&["-g", user])?));
    Some(
        of("postgres")
            .or_else(|| of("nobody"))
            .expect("no unprivileged user exists"),
    )
}
