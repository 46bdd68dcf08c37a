//! A container: a process with namespaces, a root folder and a user of its own, which shares one folder with the host.

use super::Process;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Where the shared folder is in a container.
pub const SHARED: &str = "/shared";

/// Builds a root folder on a tmpfs: the system's libraries, read-only, `/proc`, the program, and the shared folder. Then
/// runs the program there as a user without rights, in namespaces of its own.
const SCRIPT: &str = r#"set -eu
program=$1 shared=$2 root=$3 uid=$4
shift 4
mount -t tmpfs -o mode=755 none "$root"
mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$root/shared" "$root/old"
for folder in usr lib lib64 bin etc; do
    [ -e "/$folder" ] || continue
    mkdir -p "$root/$folder"
    mount --rbind "/$folder" "$root/$folder"
done
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$shared" "$root/shared"
cp "$program" "$root/program"
chmod 1777 "$root/tmp"
cd "$root"
pivot_root . old
cd /
umount -l /old
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups --no-new-privs \
    unshare --user --map-root-user --pid --fork --kill-child --mount --mount-proc --net --ipc --uts /program "$@"
"#;

/// A container that can be started.
pub struct Container {
    /// The folder of the host that it sees as [`SHARED`].
    shared: PathBuf,
    /// The mount point of its root.
    root: PathBuf,
    uid: u32,
}

impl Container {
    /// A container of user `uid` that shares the folder `shared`, with a mount point below `work`; the error says why
    /// this system does not permit it.
    pub fn new(work: &Path, shared: &Path, uid: u32) -> Result<Self, String> {
        let root = work.join(format!("root-{uid}"));
        fs::create_dir_all(&root).map_err(|error| error.to_string())?;
        let container = Self { shared: shared.into(), root, uid };
        let output = container.command(Path::new("/bin/true"), &[]).output();
        let output = output.map_err(|error| format!("unshare: {error}"))?;
        match output.status.success() {
            true => Ok(container),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().into()),
        }
    }

    /// Starts `program` with `args` in the container.
    pub fn start(&self, program: &Path, args: &[&str]) -> Process {
        Process::start(self.command(program, args))
    }

    fn command(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", SCRIPT, "container"]);
        command.arg(program).arg(&self.shared).arg(&self.root);
        command.arg(self.uid.to_string()).args(args).env("HOME", "/tmp");
        command
    }
}

/// The process that runs in a container, as the host numbers it: the only child of `unshare`; `None` before it is there.
pub fn contained(process: &Process) -> Option<u32> {
    let id = process.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}
