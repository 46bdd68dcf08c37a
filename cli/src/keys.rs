//! `tensor-relay keys`: the key of a server or client, and the client keys that a server trusts.

use crate::{
    args::{KeysArgs, KeysCommand, RevokeKeyArgs, TrustKeyArgs},
    exit::Exit,
    output::{print_json, print_line},
    serve, tickets,
};
use anyhow::{Context, bail};
use serde_json::json;
use std::path::Path;
use tensor_relay_server::Identity;

/// The name of the file with the key of [`Identity`], in the state directory.
pub(crate) const KEY_FILE: &str = "identity.key";

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
    let dir = serve::state_dir_or_default(args.state_dir.as_deref())?;
    if !has_key(&dir)? {
        bail!(
            "there is no server key in {} yet: the first `tensor-relay serve` with this state directory creates one, \
             as does `tensor-relay keys create` (run it as the user of the server); choose another directory with \
             --state-dir",
            dir.display()
        );
    }
    report(args, &dir, &Identity::load_or_create(&dir)?)
}

fn create(args: &KeysArgs) -> anyhow::Result<Exit> {
    let dir = serve::state_dir_or_default(args.state_dir.as_deref())?;
    if has_key(&dir)? {
        let fingerprint = Identity::load_or_create(&dir)?.fingerprint();
        bail!(
            "{} already holds a key, {fingerprint}: nothing was changed, because a new key would invalidate the \
             tickets that name this one",
            dir.join(KEY_FILE).display()
        );
    }
    let identity = Identity::load_or_create(&dir)?;
    crate::log::message!(
        "created a key; keep its file, because tickets are valid only with this key, and keep it secret"
    );
    report(args, &dir, &identity)
}

fn trust(args: &TrustKeyArgs) -> anyhow::Result<Exit> {
    let store = tickets::open_store(&args.state)?;
    store.trust(args.key, &args.name)?;
    crate::log::message!(
        "clients with this key now have access as key:{0}; grant them rights in the access control list, with lines \
         such as `key:{0} list,subscribe **`",
        args.name
    );
    tickets::warn_of_refused(&store);
    Ok(Exit::Done)
}

fn revoke(args: &RevokeKeyArgs) -> anyhow::Result<Exit> {
    let store = tickets::open_store(&args.state)?;
    let was_trusted = store.distrust(&args.name)?;
    tickets::warn_of_refused(&store);
    match was_trusted {
        true => {
            crate::log::message!("revoked the key; running servers close its sessions within ten seconds")
        }
        false => {
            bail!(
                "no trusted key has the name or fingerprint {:?}: `keys list` lists all trusted keys",
                args.name
            )
        }
    }
    Ok(Exit::Done)
}

fn list(args: &KeysArgs) -> anyhow::Result<Exit> {
    let mut keys: Vec<_> = tickets::open_store(args)?.rules()?.keys.into_iter().collect();
    keys.sort_by(|(_, a), (_, b)| a.cmp(b));
    match args.json {
        true => {
            let keys = keys.iter().map(|(key, name)| json!({ "key": key.to_string(), "name": name }));
            print_json(&json!({ "keys": keys.collect::<Vec<_>>() }));
        }
        false => keys.iter().for_each(|(key, name)| print_line(&format!("{key} {name}"))),
    }
    Ok(Exit::Done)
}

pub(crate) fn has_key(dir: &Path) -> anyhow::Result<bool> {
    let path = dir.join(KEY_FILE);
    path.try_exists().with_context(|| {
        format!("cannot access {}; choose another directory with --state-dir", path.display())
    })
}

fn report(args: &KeysArgs, dir: &Path, identity: &Identity) -> anyhow::Result<Exit> {
    let (key, path) = (identity.fingerprint().to_string(), dir.join(KEY_FILE));
    match args.json {
        true => print_json(&json!({ "key": key, "path": path })),
        false => print_line(&format!("{key}  {}", path.display())),
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_key_finds_the_file_of_the_identity() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!has_key(dir.path()).unwrap());
        Identity::load_or_create(dir.path()).unwrap();
        assert!(has_key(dir.path()).unwrap());
    }
}
