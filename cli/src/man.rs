//! `tensor-relay man`: the help texts as manual pages.

use crate::{args::ManArgs, config::variable, exit::Exit};
use anyhow::Context;
use clap_mangen::Man;
use std::{io::Write, path::Path};

pub(crate) fn run(args: &ManArgs) -> anyhow::Result<Exit> {
    match &args.out {
        Some(dir) => write_all(dir),
        None => print_main_page(),
    }
}

fn write_all(dir: &Path) -> anyhow::Result<Exit> {
    let written =
        std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(variable::command(), dir));
    written.with_context(|| format!("cannot write manual pages into {}", dir.display()))?;
    crate::log::message!(
        "wrote the manual pages into {0}; read one with: man {0}/tensor-relay.1",
        dir.display()
    );
    Ok(Exit::Done)
}

fn print_main_page() -> anyhow::Result<Exit> {
    let mut page = vec![];
    Man::new(variable::command().disable_help_subcommand(true)).render(&mut page)?;
    match std::io::stdout().lock().write_all(&page) {
        Ok(()) => Ok(Exit::Done),
        Err(_) => Ok(Exit::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        write_all(dir.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(read("tensor-relay.1").contains("Exit codes"));
        assert!(read("tensor-relay-serve.1").contains("TENSOR_RELAY_LISTEN"));
        assert!(read("tensor-relay-keys-create.1").contains("state\\-dir"));
    }
}
