//! [`check_user`]: which users may listen at the path of a Unix socket in a server's place.
//!
//! Whoever can create files in the socket's folder can listen there, and would get the client's token and give it tensors
//! of its own. A key would tell servers apart; a socket has none, so the kernel's word about its listener is checked.

use rustix::process::geteuid;
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf, absolute},
};

use crate::{LocalProcess, unix::overflow_uid};

/// Root, which can listen anywhere.
const ROOT: u32 = 0;

/// The most links of a path that are followed, as by the kernel.
const LINKS_MAX: usize = 40;

/// The bits of a mode that let others than the owner create files.
const OTHERS_WRITE: u32 = 0o022;

/// The bit of a mode by which users may remove only files of their own from a folder.
const STICKY: u32 = 0o1000;

/// Why the user of a listening process is not expected there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnexpectedUser {
    /// The ticket names another one.
    #[error("the ticket names user {0} as the server's (`server_uid`)")]
    NotNamed(u32),
    /// It is neither this process's user nor root, and the folder belongs to another one.
    #[error("it is neither this user, nor root, nor user {0}, whom the socket's folder belongs to")]
    NotTheOwner(u32),
    /// It is neither this process's user nor root, and others can create files on the way.
    #[error("not only its owner can create files in {}, so others could listen in the server's place", .0.display())]
    OpenFolder(PathBuf),
    /// It is neither this process's user nor root, and the owner of a folder cannot be read.
    #[error("who can create files in the socket's folder cannot be read: {0}")]
    Unknown(String),
}

/// Checks that `process` may be the server that listens at `path`. Looks at the folders of the path, if it has to.
///
/// Without a `named` user, these are expected: this process's own and root, who could read its memory in any case; and the
/// owner of the socket's folder, if nobody else can have put a socket there: no folder on the way, nor a link in one, is
/// open to others, so whoever could set up the path gave that owner the folder. A DaemonSet's receiver is admitted so.
///
/// # Errors
/// [`UnexpectedUser`]. The process must be sent nothing.
pub(super) fn check_user(
    process: LocalProcess,
    path: &Path,
    named: Option<u32>,
) -> Result<(), UnexpectedUser> {
    let (found, own) = (process.uid, geteuid().as_raw());
    match named {
        Some(named) if named == found => return Ok(()),
        Some(named) => return Err(UnexpectedUser::NotNamed(named)),
        None => {}
    }
    // The overflow uid is a number for all users without one: equality with it proves nothing.
    let overflow = overflow_uid();
    if found == ROOT || (found == own && found != overflow) {
        return Ok(());
    }
    let unknown = |error: io::Error| UnexpectedUser::Unknown(error.to_string());
    let trusted = |uid| uid == ROOT || (uid == own && uid != overflow);
    let owner = folder_owner(&absolute(path).map_err(unknown)?, trusted, find)?;
    // Here it does: no other user can create files there, with a number or without one.
    if found == owner { Ok(()) } else { Err(UnexpectedUser::NotTheOwner(owner)) }
}

/// A file as far as it matters to who can replace it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    uid: u32,
    mode: u32,
    /// The target, if it is a link.
    link: Option<PathBuf>,
}

fn find(path: &Path) -> io::Result<Found> {
    let found = fs::symlink_metadata(path)?;
    let link = found.is_symlink().then(|| fs::read_link(path)).transpose()?;
    Ok(Found { uid: found.uid(), mode: found.mode(), link })
}

/// The owner of the folder that the absolute `path` leads to, if nobody else can create files in it, and if every folder
/// and link on the way was put there by somebody who may. In a folder with the sticky bit, which all may write to, those
/// are folders of `trusted` users: nobody can put one of another user there.
fn folder_owner(
    path: &Path,
    trusted: impl Fn(u32) -> bool,
    find: impl Fn(&Path) -> io::Result<Found>,
) -> Result<u32, UnexpectedUser> {
    let find = |path: &Path| find(path).map_err(|error| UnexpectedUser::Unknown(error.to_string()));
    let mut rest: Vec<PathBuf> = names(path);
    let (mut folder, mut links) = (PathBuf::from("/"), 0);
    let mut folders = vec![find(&folder)?];
    while let Some(name) = rest.pop() {
        if name == Path::new("..") {
            folder.pop();
            folders.truncate(folders.len().saturating_sub(1).max(1));
            continue;
        }
        let holder = &folders[folders.len() - 1];
        let (is_open, is_sticky) = (holder.mode & OTHERS_WRITE != 0, holder.mode & STICKY != 0);
        let open = || Err(UnexpectedUser::OpenFolder(folder.clone()));
        if is_open && (!is_sticky || rest.is_empty()) {
            return open();
        }
        let entry = find(&folder.join(&name))?;
        match entry.link {
            Some(_) if is_open => return open(),
            Some(target) => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(UnexpectedUser::Unknown("too many links".to_owned()));
                }
                if target.is_absolute() {
                    folder = PathBuf::from("/");
                    folders.truncate(1);
                }
                rest.extend(names(&target));
            }
            None if is_open && !trusted(entry.uid) => return open(),
            None if rest.is_empty() => return Ok(holder.uid),
            None => {
                folder.push(name);
                folders.push(entry);
            }
        }
    }
    Err(UnexpectedUser::Unknown("the path ends in a folder".to_owned()))
}

/// The names in a path, the last one first.
fn names(path: &Path) -> Vec<PathBuf> {
    let names = path
        .components()
        .rev()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    names.map(|part| PathBuf::from(part.as_os_str())).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    const SERVER: u32 = 10_001;
    const OTHER: u32 = 4_242;

    /// The owner of the socket's folder among these files: `(path, owner, mode, target of a link)`.
    fn owner(path: &str, files: &[(&str, u32, u32, Option<&str>)]) -> Result<u32, UnexpectedUser> {
        let of = |&(path, uid, mode, link): &(&str, u32, u32, Option<&str>)| {
            (PathBuf::from(path), Found { uid, mode, link: link.map(PathBuf::from) })
        };
        let mut found: BTreeMap<PathBuf, Found> = [("/", 0, 0o755, None)].iter().map(of).collect();
        found.extend(files.iter().map(of));
        let find = |path: &Path| found.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into());
        folder_owner(Path::new(path), |uid| uid == ROOT, find)
    }

    fn open(path: &str) -> Result<u32, UnexpectedUser> {
        Err(UnexpectedUser::OpenFolder(path.into()))
    }

    #[test]
    fn a_folder_of_one_user_names_the_server() {
        let files = |folder, mode| {
            [("/run", 0, 0o755, None), ("/run/s", folder, mode, None), ("/run/s/a", OTHER, 0o666, None)]
        };
        for mode in [0o700, 0o750, 0o755, 0o2755] {
            assert_eq!(owner("/run/s/a", &files(SERVER, mode)), Ok(SERVER), "{mode:o}");
            assert_eq!(
                owner(
                    "/run/../run/s/x/../a",
                    &[&files(SERVER, mode)[..], &[("/run/s/x", 9, 0o700, None)]].concat()
                ),
                Ok(SERVER)
            );
        }
        for mode in [0o770, 0o777, 0o1777, 0o2775, 0o702] {
            assert_eq!(owner("/run/s/a", &files(SERVER, mode)), open("/run/s"), "{mode:o}");
        }
    }

    /// Goal: a folder that any user could have made in a folder of all names nobody; one of root's does.
    #[test]
    fn folders_within_open_ones() {
        let files = |mode, uid| {
            [("/tmp", 0, mode, None), ("/tmp/s", uid, 0o755, None), ("/tmp/s/a", OTHER, 0o666, None)]
        };
        assert_eq!(owner("/tmp/s/a", &files(0o1777, OTHER)), open("/tmp"));
        assert_eq!(owner("/tmp/s/a", &files(0o1777, 0)), Ok(0));
        assert_eq!(owner("/tmp/s/a", &files(0o777, 0)), open("/tmp"));
        assert_eq!(owner("/tmp/s", &[("/tmp", 0, 0o1777, None), ("/tmp/s", 0, 0o666, None)]), open("/tmp"));
    }

    /// Goal: a link counts as its folder does, wherever it leads to. Method: links before and at the end of a path.
    #[test]
    fn links_are_followed_where_nobody_else_can_make_them() {
        let files = [
            ("/tmp", 0, 0o1777, None),
            ("/tmp/link", OTHER, 0o777, Some("/home/other")),
            ("/tmp/root", 0, 0o777, Some("/home/other")),
            ("/home", 0, 0o755, None),
            ("/home/other", OTHER, 0o755, None),
            ("/home/other/a", OTHER, 0o666, None),
            ("/home/up", 0, 0o777, Some("../run")),
            ("/home/loop", 0, 0o777, Some("loop")),
            ("/run", SERVER, 0o755, None),
            ("/run/a", SERVER, 0o777, Some("/home/other/a")),
            ("/run/b", SERVER, 0o600, None),
        ];
        assert_eq!(owner("/tmp/link/a", &files), open("/tmp"));
        assert_eq!(owner("/tmp/root/a", &files), open("/tmp"));
        assert_eq!(owner("/run/a", &files), Ok(OTHER));
        assert_eq!(owner("/home/up/b", &files), Ok(SERVER));
        for bad in ["/home/loop/a", "/home/none/a", "/", "/run/.."] {
            assert!(matches!(owner(bad, &files), Err(UnexpectedUser::Unknown(_))), "{bad}");
        }
    }

    /// Goal: the system's files are read as the rule needs them. Method: a folder of this user; open it, and lead to it by a
    /// link; a process of another user.
    #[test]
    fn a_named_user_is_the_only_one() {
        let home = tempfile::tempdir().unwrap();
        let own = geteuid().as_raw();
        let process = |uid| LocalProcess { uid, gid: 5, pid: None };
        let path = home.path().join("s");
        fs::write(&path, "").unwrap();
        let stranger = own + 1;
        assert_eq!(check_user(process(own), &path, None), Ok(()));
        assert_eq!(check_user(process(0), &path, None), Ok(()));
        assert_eq!(check_user(process(stranger), &path, Some(stranger)), Ok(()));
        assert_eq!(check_user(process(own), &path, Some(stranger)), Err(UnexpectedUser::NotNamed(stranger)));
        assert_eq!(check_user(process(0), &path, Some(stranger)), Err(UnexpectedUser::NotNamed(stranger)));
        let real = fs::canonicalize(home.path()).unwrap();
        if real.starts_with("/tmp") {
            let refused = check_user(process(stranger), &path, None);
            assert_eq!(refused, Err(UnexpectedUser::NotTheOwner(own)));
            let link = home.path().join("link");
            symlink(&path, &link).unwrap();
            assert_eq!(check_user(process(stranger), &link, None), Err(UnexpectedUser::NotTheOwner(own)));
            fs::set_permissions(home.path(), fs::Permissions::from_mode(0o777)).unwrap();
            let refused = check_user(process(stranger), &path, None);
            assert_eq!(refused, Err(UnexpectedUser::OpenFolder(home.path().into())));
        }
    }
}
