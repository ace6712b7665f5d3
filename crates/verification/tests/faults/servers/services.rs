//! The three services. Each is a process behind its own proxy.

use std::{env, process::Command};

use tokio::sync::Mutex;

use crate::{
    service::variables,
    support::{ports::free_port, process::Process, proxy::Proxy, wall_clock::WallClock},
};

/// The settings of the services.
pub struct Settings {
    /// The URL of Postgres.
    pub database: String,
    /// The URL of PgBouncer in front of Postgres.
    pub pooled: String,
    pub store: &'static str,
    pub store_urls: Vec<String>,
}

pub struct Service {
    variables: Vec<(String, String)>,
    process: Option<Process>,
}

pub struct Services {
    pub services: Vec<Mutex<Service>>,
    /// The proxies through which clients reach the services.
    pub links: Vec<Proxy>,
    /// The wall clock of the first service.
    pub clock: WallClock,
    /// The URL at which the first service returns its time.
    time_url: String,
}

impl Services {
    /// Starts the services. The first has default settings, the second reuses connections from
    /// write to write, and the third connects through PgBouncer.
    pub async fn start(settings: &Settings) -> Self {
        let clock = WallClock::right();
        let mut time_url = String::new();
        let (mut services, mut links) = (vec![], vec![]);
        for n in 0..3 {
            let port = free_port();
            let url = if n == 2 {
                &settings.pooled
            } else {
                &settings.database
            };
            let mut variables = vec![
                (variables::ADDR, format!("127.0.0.1:{port}")),
                (variables::DATABASE_URL, url.clone()),
                (variables::LISTEN_URL, settings.database.clone()),
                (variables::STORE, settings.store.into()),
                (variables::STORE_URLS, settings.store_urls.join(" ")),
            ];
            if n == 1 {
                variables.push((variables::REUSE, "yes".into()));
            }
            if n == 0 {
                time_url = format!("http://127.0.0.1:{port}/time");
                let clock = clock
                    .variables()
                    .map(|(name, value)| (name, value.to_owned()));
                variables.extend(clock);
            }
            let variables = variables
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value));
            let mut service = Service {
                variables: variables.collect(),
                process: None,
            };
            service.start().await;
            services.push(Mutex::new(service));
            links.push(Proxy::to(([127, 0, 0, 1], port).into()).await);
        }
        Self {
            services,
            links,
            clock,
            time_url,
        }
    }

    /// Reads the clock of the first service, in seconds.
    pub async fn time(&self) -> Option<i64> {
        let asked = reqwest::get(&self.time_url).await.ok()?;
        asked.text().await.ok()?.parse().ok()
    }

    pub fn urls(&self) -> Vec<String> {
        self.links
            .iter()
            .map(|link| format!("http://{}", link.addr))
            .collect()
    }
}

impl Service {
    pub async fn start(&mut self) {
        let mut command = Command::new(env::current_exe().unwrap());
        command.arg("service").envs(self.variables.iter().cloned());
        let mut process = Process::run(command);
        process.prints("listens", 1).await;
        self.process = Some(process);
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn signal(&self, signal: &str) {
        self.process
            .as_ref()
            .expect("the service is running")
            .signal(signal);
    }
}
