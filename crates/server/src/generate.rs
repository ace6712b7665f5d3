//! `generate`: writes the man pages and the shell completions for packages.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::{failure::Failure, operate::print};

/// Writes the man pages to FOLDER/man, and the shell completions to FOLDER/completions.
///
/// The man pages are tower-fence(1) and one for each command, such as tower-fence-serve(1). The
/// completions are for bash, zsh and fish.
#[derive(Args)]
pub struct GenerateArgs {
    /// The folder, which is created if it is missing.
    folder: PathBuf,
}

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes the man pages and the completions of this program.
pub fn generate(args: GenerateArgs, program: Command) -> Result<u8, Failure> {
    let failed = |error| Failure::file("cannot write to", &args.folder, error);
    write(&args.folder, program).map_err(failed)?;
    let folder = args.folder.display();
    print(&format!("the man pages and completions are in {folder}\n"))
}

fn write(folder: &Path, mut program: Command) -> io::Result<()> {
    let [man, completions] = ["man", "completions"].map(|name| folder.join(name));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    clap_mangen::generate_to(program.clone(), &man)?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut program, "tower-fence", &completions)?;
    }
    // If the name of the program contains a hyphen, clap_complete writes the name of each state in
    // two ways, and bash completes no options of commands (clap-rs/clap#6421).
    let bash = completions.join("tower-fence.bash");
    let text = fs::read_to_string(&bash)?;
    fs::write(bash, text.replace("tower__subcmd__fence", "tower__fence"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn each_man_page_names_every_option() {
        let folder = tempfile::tempdir().unwrap();
        let program = Cli::command();
        write(folder.path(), program.clone()).unwrap();
        let mut named = 0;
        let shown = |command: &&clap::Command| !command.is_hide_set();
        for command in program.get_subcommands().filter(shown) {
            let page = format!("man/tower-fence-{}.1", command.get_name());
            let text = fs::read_to_string(folder.path().join(page)).unwrap();
            // A man page escapes hyphens.
            let text = text.replace("\\-", "-");
            for option in command.get_opts() {
                let name = format!("--{}", option.get_long().unwrap());
                assert!(text.contains(&name), "{name} of {}", command.get_name());
                named += 1;
            }
        }
        assert!(named > 60, "{named}");
        for completion in ["tower-fence.bash", "_tower-fence", "tower-fence.fish"] {
            let file = folder.path().join("completions").join(completion);
            let text = fs::read_to_string(file).unwrap();
            assert!(text.contains("drain-delay"), "{completion}");
            assert!(!text.contains("tower__subcmd__fence"), "{completion}");
        }
    }
}
