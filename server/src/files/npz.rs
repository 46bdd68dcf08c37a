//! Reads archives of NumPy arrays.

use super::{
    Contents, DataLocation, FileError, SkipReason, SkippedEntry, served::FileReader, served::ServedFile,
};
use std::io::{self, BufReader, Read};
use tensor_relay_protocol::{
    TensorName, TensorSpec,
    files::{FileForm, FileKind, is_entry_name},
    npy::{NpyError, PREFIX_BYTES, header_end, parse_header},
};
use zip::{CompressionMethod, ZipArchive, read::ZipFile};

/// The extension of arrays in an archive, which the tensor's name lacks.
const ENTRY_EXTENSION: &str = ".npy";

/// Reads the headers of an archive's arrays.
pub(super) fn read(file: ServedFile) -> Result<Contents, FileError> {
    let mut archive = Archive::open(&file)?;
    if archive.zip.has_duplicate_names() {
        let source = io::Error::new(io::ErrorKind::InvalidData, "two entries have the same name");
        return Err(FileError::Archive { path: file.path.clone(), source });
    }
    let mut contents = Contents::new(FileForm::new(FileKind::Npz));
    for entry in 0..archive.zip.len() {
        archive.read_header(entry, &mut contents)?;
    }
    contents.files.push(file);
    Ok(contents)
}

/// An open archive.
pub(super) struct Archive<'a> {
    file: &'a ServedFile,
    zip: ZipArchive<BufReader<FileReader<'a>>>,
}

impl<'a> Archive<'a> {
    pub(super) fn open(file: &'a ServedFile) -> Result<Self, FileError> {
        let zip = ZipArchive::new(file.reader());
        let zip = zip.map_err(|e| FileError::Archive { path: file.path.clone(), source: e.into() })?;
        Ok(Self { file, zip })
    }

    /// Adds the array of one entry to `contents`, or skips the entry.
    fn read_header(&mut self, entry: usize, contents: &mut Contents) -> Result<(), FileError> {
        let file = self.file;
        let mut opened = self.entry(entry)?;
        let entry_name = opened
            .name()
            .map_err(io::Error::from)
            .map_err(|e| archive_error(file, e))?
            .into_owned();
        let Some(name) = entry_name.strip_suffix(ENTRY_EXTENSION) else {
            contents.skipped.push(SkippedEntry::new(entry_name, SkipReason::NotAnArray));
            return Ok(());
        };
        if !is_entry_name(name) {
            return Err(FileError::EntryName { path: file.path.clone(), entry: entry_name });
        }
        let name =
            TensorName::new(name).map_err(|source| FileError::Name { path: file.path.clone(), source })?;
        super::check_reserved(file, std::iter::once(name.as_str()))?;
        let size = opened.size();
        let header = read_header_bytes(&mut opened, size);
        let stored_start = match opened.compression() {
            CompressionMethod::Stored => opened.data_start(),
            _ => None,
        };
        let header = match header.map_err(|source| archive_error(file, source))? {
            Ok(header) => parse_header(&header, size),
            Err(refused) => Err(refused),
        };
        let header = header.map_err(|source| FileError::Entry {
            path: file.path.clone(),
            entry: entry_name,
            source,
        })?;
        let data = DataLocation::ArchiveEntry {
            entry,
            header_bytes: header.data_start,
            is_fortran: header.fortran_order,
            data_offset: stored_start.map(|start| start + header.data_start),
        };
        contents.push(TensorSpec::new(name, header.dtype, header.shape), 0, data);
        Ok(())
    }

    /// Reads the elements of an entry, which follow a header of `header_bytes`, and checks the entry's checksum.
    pub(super) fn read_elements(
        &mut self,
        entry: usize,
        header_bytes: u64,
        out: &mut [u8],
    ) -> Result<(), FileError> {
        let file = self.file;
        let mut opened = self.entry(entry)?;
        let outcome = io::copy(&mut opened.by_ref().take(header_bytes), &mut io::sink())
            .and_then(|_| opened.read_exact(out))
            .and_then(|()| super::served::drain(BufReader::new(opened)));
        match outcome {
            Ok(0) => Ok(()),
            Ok(_) => Err(FileError::Changed { path: file.path.clone() }),
            Err(source) => Err(archive_error(file, source)),
        }
    }

    /// Reads an entry to its end, which checks its checksum.
    pub(super) fn verify(&mut self, entry: usize) -> Result<(), FileError> {
        let file = self.file;
        let opened = self.entry(entry)?;
        let drained = super::served::drain(BufReader::with_capacity(1 << 20, opened));
        drained.map(drop).map_err(|source| archive_error(file, source))
    }

    fn entry(&mut self, entry: usize) -> Result<ZipFile<'_, BufReader<FileReader<'a>>>, FileError> {
        let file = self.file;
        self.zip.by_index(entry).map_err(|error| archive_error(file, error.into()))
    }
}

/// Reads the header of an array; the inner error is about its length. Allocates at most the maximum length of headers.
fn read_header_bytes(entry: &mut impl Read, entry_bytes: u64) -> io::Result<Result<Vec<u8>, NpyError>> {
    let mut header = vec![];
    entry.by_ref().take(PREFIX_BYTES as u64).read_to_end(&mut header)?;
    let end = match header_end(&header, entry_bytes) {
        Ok(end) => end,
        Err(refused) => return Ok(Err(refused)),
    };
    let remaining = end.saturating_sub(header.len());
    entry.take(remaining as u64).read_to_end(&mut header)?;
    header.truncate(end);
    Ok(Ok(header))
}

fn archive_error(file: &ServedFile, source: io::Error) -> FileError {
    FileError::Archive { path: file.path.clone(), source }
}
