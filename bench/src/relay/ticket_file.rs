//! Passes the ticket from the serving side to the receiving side, on the same machine, through a file.

use anyhow::{Context, Result};
use std::{
    fs::{self, OpenOptions},
    io::{ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};
use tensor_relay_client::Ticket;

/// The file with the ticket. The file is removed when a receiver takes the ticket, or when this value is dropped.
#[derive(Debug)]
pub(crate) struct TicketFile(PathBuf);

impl TicketFile {
    /// Writes the `ticket` of the server at `port` to a file that only the same user can read. A file that a killed
    /// server left behind is replaced.
    ///
    /// # Errors
    /// When a file of this name belongs to another user, or cannot be written.
    pub(super) fn create(port: u16, ticket: &Ticket) -> Result<Self> {
        let path = path_for(port);
        let context = || format!("cannot write a ticket to {}", path.display());
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != ErrorKind::NotFound
        {
            return Err(error).with_context(context);
        }
        // `create_new` does not follow a symbolic link that another user may have put there.
        let mut options = OpenOptions::new();
        let created = options.write(true).create_new(true).mode(OWNER_ONLY).open(&path);
        let mut file = created.with_context(context)?;
        file.write_all(ticket.to_string().as_bytes()).with_context(context)?;
        Ok(Self(path))
    }
}

impl Drop for TicketFile {
    fn drop(&mut self) {
        // Fails if a receiver has taken the ticket, which is usual.
        fs::remove_file(&self.0).ok();
    }
}

/// Reads the ticket of the server at `port` and removes its file.
///
/// # Errors
/// When there is no file, or its content is no ticket.
pub(super) fn take(port: u16) -> Result<Ticket> {
    let path = path_for(port);
    let ticket = fs::read_to_string(&path).with_context(|| format!("no server wrote {}", path.display()))?;
    fs::remove_file(&path)?;
    Ok(ticket.parse()?)
}

fn path_for(port: u16) -> PathBuf {
    std::env::temp_dir().join(format!("tensor-relay-bench-{port}.ticket"))
}

const OWNER_ONLY: u32 = 0o600;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Goal: only its user can read a ticket, and taking the ticket removes its file. Method: a port without a server.
    #[test]
    fn a_ticket_is_taken_once() {
        let ticket = Ticket::new(vec!["127.0.0.1:1".into()], vec![[7; 32]], None).unwrap();
        let _replaced = TicketFile::create(1, &ticket).unwrap();
        let file = TicketFile::create(1, &ticket).unwrap();
        let mode = fs::metadata(&file.0).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, OWNER_ONLY);
        assert_eq!(take(1).unwrap().to_string(), ticket.to_string());
        assert!(take(1).is_err());
    }

    #[test]
    fn dropping_a_ticket_file_removes_it() {
        let ticket = Ticket::new(vec!["127.0.0.1:2".into()], vec![[7; 32]], None).unwrap();
        drop(TicketFile::create(2, &ticket).unwrap());
        assert!(!path_for(2).exists());
    }
}
