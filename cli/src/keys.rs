//! `tensor-relay keys`: the server's key, and the known keys of clients.

use crate::{
    args::{KeysArgs, KeysCommand, RevokeKeyArgs, TrustKeyArgs},
    exit::Exit,
    serve,
    subscribe::print_line,
    tickets,
};
use anyhow::{Context, bail};
use serde_json::json;
use std::path::Path;
use tensor_relay_server::Identity;

/// The file in the state directory in which [`Identity`] keeps the key.
const KEY_FILE: &str = "identity.key";

pub(crate) fn run(command: KeysCommand) -> anyhow::Result<Exit> {
    match command {
        KeysCommand::Show(args) => show(&args),
        KeysCommand::Create(args) => create(&args),
        KeysCommand::Trust(args) => trust(&args),
        KeysCommand::Revoke(args) => revoke(&args),
        KeysCommand::List(args) => list(&args),
    }
}

fn show(args: &KeysArgs) -> anyhow::Result<Exit> {
    let dir = serve::state_dir(args.state_dir.as_deref())?;
    if !has_key(&dir)? {
        bail!(
            "there is no server key in {} yet: the first `tensor-relay serve` with this state directory makes one, and \
             so does `tensor-relay keys create`, run by the user who serves; --state-dir names another place",
            dir.display()
        );
    }
    report(args, &dir, &Identity::load_or_create(&dir)?)
}

fn create(args: &KeysArgs) -> anyhow::Result<Exit> {
    let dir = serve::state_dir(args.state_dir.as_deref())?;
    if has_key(&dir)? {
        let fingerprint = Identity::load_or_create(&dir)?.fingerprint();
        bail!(
            "{} holds a key already, {fingerprint}: nothing was changed, because the tickets that name this key would \
             no longer be valid",
            dir.join(KEY_FILE).display()
        );
    }
    let identity = Identity::load_or_create(&dir)?;
    crate::log::say!(
        "made a key; tickets stay valid as long as this file is kept, and nobody else may read it"
    );
    report(args, &dir, &identity)
}

fn trust(args: &TrustKeyArgs) -> anyhow::Result<Exit> {
    tickets::store(&args.state)?.trust(args.key, &args.name)?;
    crate::log::say!(
        "clients with this key are let in as key:{0}; what they may do, the access control list says, with lines like `key:{0} \
         list,subscribe **`",
        args.name
    );
    Ok(Exit::Done)
}

fn revoke(args: &RevokeKeyArgs) -> anyhow::Result<Exit> {
    match tickets::store(&args.state)?.distrust(&args.name)? {
        true => crate::log::say!("servers that run cut its sessions within ten seconds"),
        false => {
            bail!("no key is called {:?}, or has that fingerprint: `keys list` shows them all", args.name)
        }
    }
    Ok(Exit::Done)
}

fn list(args: &KeysArgs) -> anyhow::Result<Exit> {
    let mut keys: Vec<_> = tickets::store(args)?.rules()?.keys.into_iter().collect();
    keys.sort_by(|(_, one), (_, other)| one.cmp(other));
    match args.json {
        true => {
            let keys = keys.iter().map(|(key, name)| json!({ "key": key.to_string(), "name": name }));
            print_line(&json!({ "keys": keys.collect::<Vec<_>>() }).to_string());
        }
        false => keys.iter().for_each(|(key, name)| print_line(&format!("{key} {name}"))),
    }
    Ok(Exit::Done)
}

fn has_key(dir: &Path) -> anyhow::Result<bool> {
    let path = dir.join(KEY_FILE);
    path.try_exists()
        .with_context(|| format!("cannot look for {}; --state-dir names another place", path.display()))
}

fn report(args: &KeysArgs, dir: &Path, identity: &Identity) -> anyhow::Result<Exit> {
    let (key, path) = (identity.fingerprint().to_string(), dir.join(KEY_FILE));
    match args.json {
        true => print_line(&json!({ "key": key, "path": path }).to_string()),
        false => print_line(&format!("{key}  {}", path.display())),
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_looked_for_where_it_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!has_key(dir.path()).unwrap());
        Identity::load_or_create(dir.path()).unwrap();
        assert!(has_key(dir.path()).unwrap());
    }
}
