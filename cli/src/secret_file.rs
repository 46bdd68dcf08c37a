//! [`read`]: reads files that hold secrets: tickets, and the tokens of admin ports.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};
use tensor_relay_server::Exposure;

/// The text of the file at `path`, at most `max_bytes` of it. Warns if others can read or change the file.
///
/// # Errors
/// When it cannot be read, and when everybody can write it: then its content may be anybody's.
pub(crate) fn read(path: &Path, max_bytes: u64) -> io::Result<String> {
    let file = File::open(path)?;
    let found = file.metadata()?;
    let shown = path.display();
    match Exposure::of(&found) {
        _ if !found.is_file() => {} // A pipe of the shell.
        Exposure::Writable => {
            let text = format!("everybody can write it: run `chmod 600 {shown}`, and check its content");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        exposure @ (Exposure::Readable | Exposure::GroupWritable) => {
            crate::log::message!("warning: {shown} holds a secret and {exposure}: run `chmod 600 {shown}`");
        }
        Exposure::None | Exposure::Foreign => {}
    }
    let mut text = String::new();
    file.take(max_bytes).read_to_string(&mut text)?;
    Ok(text)
}
