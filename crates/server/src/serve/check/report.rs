//! The findings of `check`, and their output.

use std::{error::Error, fmt, time::Duration};

use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    failure::{CONFIGURATION, Failure, chain},
    logs,
    operate::print,
};

/// The timeout for the answer of a server.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Ok,
    Note,
    Problem,
}

impl Level {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

struct Finding {
    level: Level,
    subject: &'static str,
    text: String,
}

/// Formats a line of the report.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (level, subject, text) = (self.level.name(), self.subject, &self.text);
        write!(f, "{level:<7}  {subject:<10}  {text}")
    }
}

/// Returns the answer of a server, or an error if there is none within the timeout.
pub async fn within<T, E: Error + 'static>(
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, String> {
    match timeout(LIMIT, answer).await {
        Ok(answer) => answer.map_err(|error| chain(&error)),
        Err(_) => Err("no answer in time".into()),
    }
}

/// The address of a member of a store, and its version or the reason why it does not answer.
pub type Answer = (String, Result<String, String>);

/// The findings, in the order in which they were added.
#[derive(Default)]
pub struct Report(Vec<Finding>);

impl Report {
    pub fn ok(&mut self, subject: &'static str, text: impl Into<String>) {
        self.add(Level::Ok, subject, text.into());
    }

    pub fn note(&mut self, subject: &'static str, text: impl Into<String>) {
        self.add(Level::Note, subject, text.into());
    }

    pub fn problem(&mut self, subject: &'static str, text: impl Into<String>) {
        let failure = Failure::configuration(text);
        self.add(Level::Problem, subject, failure.for_people());
    }

    /// Returns the value of a successful outcome. Adds a failure to the findings as a problem.
    pub fn take<T>(&mut self, subject: &'static str, outcome: Result<T, Failure>) -> Option<T> {
        outcome
            .map_err(|failure| self.problem(subject, failure.text))
            .ok()
    }

    /// Adds the answer of each member of a store. If at least `needed` members answer, the store
    /// may grant leases, and a member that does not answer is a note.
    pub fn members(&mut self, subject: &'static str, needed: usize, answers: Vec<Answer>) {
        let found = answers.iter().filter(|(_, answer)| answer.is_ok()).count();
        for (place, answer) in answers {
            match answer {
                Ok(text) => self.ok(subject, format!("{place}: {text}")),
                Err(text) if found >= needed => self.note(subject, format!("{place}: {text}")),
                Err(text) => self.problem(subject, format!("{place}: {text}")),
            }
        }
    }

    fn add(&mut self, level: Level, subject: &'static str, text: String) {
        let finding = Finding {
            level,
            subject,
            text,
        };
        self.0.push(finding);
    }

    /// Prints the findings, and returns the exit status.
    pub fn print(&self, as_json: bool) -> Result<u8, Failure> {
        if as_json {
            let all: Vec<_> = self.0.iter().map(object).collect();
            print(&format!("{:#}\n", Value::from(all)))?;
        } else {
            for finding in &self.0 {
                match finding.level {
                    Level::Problem => logs::say(finding),
                    _ => _ = print(&format!("{finding}\n"))?,
                }
            }
        }
        Ok(
            match self.0.iter().any(|found| found.level == Level::Problem) {
                true => CONFIGURATION,
                false => 0,
            },
        )
    }
}

fn object(finding: &Finding) -> Value {
    json!({
        "level": finding.level.name(),
        "subject": finding.subject,
        "text": finding.text,
    })
}
