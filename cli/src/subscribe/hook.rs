//! The command that runs after each version.

use std::{path::Path, process::Stdio};
use tensor_relay_client::VersionId;
use tokio::process::Command;

/// Runs `command` in a shell and waits for it. One that fails is told and changes nothing else: the version is there,
/// and the next one may do better.
pub(crate) async fn run(command: &str, id: &VersionId, path: Option<&Path>) {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null());
    shell.env("TENSOR_RELAY_TOPIC", id.topic.as_str());
    shell.env("TENSOR_RELAY_VERSION", id.version.to_string());
    shell.env("TENSOR_RELAY_EPOCH", id.epoch.to_string());
    match path {
        Some(path) => shell.env("TENSOR_RELAY_PATH", path),
        None => shell.env_remove("TENSOR_RELAY_PATH"),
    };
    match shell.kill_on_drop(true).status().await {
        Ok(status) if status.success() => {}
        Ok(status) => eprintln!("warning: the command of --exec ended with {status} for {id}"),
        Err(error) => eprintln!("warning: the command of --exec cannot be run: {error}"),
    }
}
