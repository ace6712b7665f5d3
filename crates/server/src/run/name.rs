//! The default name of a resource: the file name of the command.

use std::{ffi::OsStr, path::Path};

use tower_fence::Resource;

use crate::{failure::Failure, operate::resource};

/// Programs whose file name does not identify a job, because they run a script or another program.
/// A version number at the end of the name is ignored, as in `python3.12`.
const INTERPRETERS_AND_WRAPPERS: [&str; 96] = [
    "ash",
    "bash",
    "busybox",
    "csh",
    "dash",
    "elvish",
    "fish",
    "ksh",
    "mksh",
    "nu",
    "pwsh",
    "sh",
    "tcsh",
    "xonsh",
    "zsh",
    // Interpreters.
    "Rscript",
    "awk",
    "bun",
    "deno",
    "dotnet",
    "elixir",
    "gawk",
    "java",
    "julia",
    "lua",
    "luajit",
    "mawk",
    "node",
    "nodejs",
    "perl",
    "php",
    "pypy",
    "python",
    "ruby",
    "tclsh",
    // Programs that run another program.
    "bundle",
    "catchsegv",
    "choom",
    "chpst",
    "chronic",
    "chroot",
    "chrt",
    "doas",
    "docker",
    "dumb-init",
    "eatmydata",
    "env",
    "fakeroot",
    "flock",
    "gosu",
    "ionice",
    "kubectl",
    "ltrace",
    "make",
    "nice",
    "nohup",
    "npm",
    "npx",
    "nsenter",
    "numactl",
    "parallel",
    "pipenv",
    "pkexec",
    "pnpm",
    "podman",
    "poetry",
    "prlimit",
    "run-parts",
    "runuser",
    "script",
    "setarch",
    "setpriv",
    "setsid",
    "softlimit",
    "ssh",
    "stdbuf",
    "strace",
    "su",
    "su-exec",
    "sudo",
    "systemd-cat",
    "systemd-run",
    "taskset",
    "time",
    "timeout",
    "tini",
    "tower-fence",
    "unbuffer",
    "unshare",
    "uv",
    "uvx",
    "valgrind",
    "watch",
    "xargs",
    "xvfb-run",
    "yarn",
];

/// Returns the resource of a command if no name is given.
///
/// # Errors
///
/// [`Failure::usage`] if the command is an interpreter or a wrapper, because two different jobs
/// would have the same name.
pub fn default_resource(program: &OsStr) -> Result<Resource, Failure> {
    let name = Path::new(program).file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    if runs_something_else(&name) {
        return Err(Failure::usage(format!(
            "set the resource with --resource NAME: `{name}` runs another program or a script, so every \
             job that starts with it would have the same name"
        )));
    }
    resource(&name)
}

fn runs_something_else(name: &str) -> bool {
    let versionless = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    INTERPRETERS_AND_WRAPPERS.contains(&name) || INTERPRETERS_AND_WRAPPERS.contains(&versionless)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_is_named_after_its_script_not_its_interpreter() {
        for (program, name) in [
            ("./backup.sh", "backup.sh"),
            ("/usr/bin/pg_dump", "pg_dump"),
            ("report2", "report2"),
            ("shred", "shred"),
        ] {
            let resource = default_resource(OsStr::new(program)).unwrap();
            assert_eq!(resource.as_str(), name);
        }
        for program in [
            "sh",
            "/bin/bash",
            "python3",
            "python3.12",
            "/opt/perl5.36.0",
            "node-20",
            "env",
            "timeout",
            "sudo",
            "xargs",
            "nice",
            "docker",
            "npx",
            "run-parts",
            "..",
            "",
        ] {
            let refused = default_resource(OsStr::new(program)).unwrap_err();
            assert_eq!(refused.status, crate::failure::USAGE, "{program}");
        }
    }
}
