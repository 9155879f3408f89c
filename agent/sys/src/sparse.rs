//! Files with holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{SeekFrom, seek};

/// The unit of a file's allocated size.
const BLOCK_BYTES: u64 = 512;

/// Where the next data of a file is, at `from` or after it; `from` if there is none, or if the file system has no such call.
#[must_use]
pub fn data_from(file: &File, from: u64) -> u64 {
    seek(file, SeekFrom::Data(from)).map_or(from, |at| at.max(from))
}

/// Reads the data of a file, without the zeros of its holes.
#[derive(Debug)]
pub struct DataReader {
    file: File,
    at: u64,
}

impl DataReader {
    /// A reader for a regular file with holes; the file itself if it is another one.
    ///
    /// # Errors
    /// The file has no metadata.
    pub fn of(file: File) -> io::Result<Result<DataReader, File>> {
        let of = file.metadata()?;
        let has_holes = of.is_file() && of.blocks().saturating_mul(BLOCK_BYTES) < of.len();
        Ok(if has_holes { Ok(DataReader { file, at: 0 }) } else { Err(file) })
    }
}

impl io::Read for DataReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.at = match seek(&self.file, SeekFrom::Data(self.at)) {
            // All that is left is a hole.
            Err(rustix::io::Errno::NXIO) => return Ok(0),
            Err(_) => self.at,
            Ok(at) => at,
        };
        let count = self.file.read_at(into, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn holes_are_not_read() {
        let directory = testing::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(10 << 30).unwrap();
        file.write_all_at(b"end\n", 9 << 30).unwrap();
        assert_eq!(data_from(&file, 0), 9 << 30);
        assert_eq!(data_from(&file, 10 << 30), 10 << 30);
        let mut text = Vec::new();
        DataReader::of(file).unwrap().unwrap().read_to_end(&mut text).unwrap();
        assert!(text.starts_with(b"end\n") && text.len() < 1 << 20, "{} bytes", text.len());
        std::fs::write(&path, "no hole").unwrap();
        assert!(DataReader::of(File::open(&path).unwrap()).unwrap().is_err());
    }
}
