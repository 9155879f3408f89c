//! Compressed logs and logs in UTF-16, read as text: rotated logs are gzip, zstd or xz, and so is what NVIDIA's bug report writes.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::StreamingDecoder;

/// The most text that one compressed file is read to.
const MAX_TEXT_BYTES: u64 = 64 << 30;
/// The most times that a text may be larger than its file, from `MIN_EXPANDED_BYTES` of text on: more was made to fill
/// memory or time.
const MAX_EXPANSION: u64 = 200;
const MIN_EXPANDED_BYTES: u64 = 256 << 20;
/// The most memory that a decoder of xz may ask for, in KiB.
const MAX_XZ_KIB: u32 = 256 << 10;
/// Bytes that are read from a file at a time.
const READ_BYTES: usize = 64 << 10;

/// The text of a file, whatever it is packed in, and whether it was packed.
///
/// # Errors
/// The file cannot be read.
pub(super) fn text_of(source: Box<dyn Read>) -> io::Result<(Box<dyn Read>, bool)> {
    let read = Rc::new(Cell::new(0));
    let mut source = BufReader::with_capacity(READ_BYTES, CountingReader { source, read: Rc::clone(&read) });
    let begin = source.fill_buf()?;
    let limited = |text: Box<dyn Read>| -> Box<dyn Read> { Box::new(Limited { text, written: 0, read }) };
    let text: Box<dyn Read> = match begin {
        [0x1f, 0x8b, ..] => limited(Box::new(MultiGzDecoder::new(source))),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => limited(Box::new(Frames { source: Some(source), frame: None })),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            limited(Box::new(XzReader::new_mem_limit(source, true, MAX_XZ_KIB)))
        }
        [0xff, 0xfe, ..] => Box::new(Utf16::new(source, u16::from_le_bytes)),
        [0xfe, 0xff, ..] => Box::new(Utf16::new(source, u16::from_be_bytes)),
        _ => return Ok((Box::new(source), false)),
    };
    Ok((text, true))
}

/// Counts the bytes that were read.
struct CountingReader<R> {
    source: R,
    read: Rc<Cell<u64>>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(into)?;
        self.read.set(self.read.get() + count as u64);
        Ok(count)
    }
}

/// Ends a text that is too large for its file.
struct Limited {
    text: Box<dyn Read>,
    written: u64,
    read: Rc<Cell<u64>>,
}

impl Read for Limited {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.written > MAX_TEXT_BYTES
            || self.written > MIN_EXPANDED_BYTES && self.written / MAX_EXPANSION > self.read.get()
        {
            let why =
                format!("its text is more than {MAX_EXPANSION} times as large as the file, or than 64 GiB");
            return Err(io::Error::new(ErrorKind::InvalidData, why));
        }
        let count = self.text.read(into)?;
        self.written += count as u64;
        Ok(count)
    }
}

/// The frames of a zstd file, one after the other.
struct Frames<R: BufRead> {
    /// The file between two frames.
    source: Option<R>,
    frame: Option<Box<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>>,
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(mut source) = self.source.take() {
                if source.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                let frame = StreamingDecoder::new(source);
                let frame =
                    frame.map_err(|error| io::Error::new(ErrorKind::InvalidData, error.to_string()))?;
                self.frame = Some(Box::new(frame));
            }
            let Some(frame) = &mut self.frame else { return Ok(0) };
            match frame.read(into)? {
                0 => self.source = self.frame.take().map(|frame| frame.into_inner()),
                count => return Ok(count),
            }
        }
    }
}

/// UTF-16 as UTF-8. A half of a pair without its other half becomes the replacement character.
struct Utf16<R> {
    source: R,
    unit: fn([u8; 2]) -> u16,
    /// The first half of a pair at the end of a piece.
    half: Option<u16>,
    text: Vec<u8>,
    /// The part of `text` that was given out.
    given: usize,
}

impl<R: Read> Utf16<R> {
    fn new(source: R, unit: fn([u8; 2]) -> u16) -> Utf16<R> {
        Utf16 { source, unit, half: None, text: Vec::new(), given: 0 }
    }

    /// Decodes the next piece into `text`, which stays empty at the end.
    fn decode(&mut self) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(READ_BYTES);
        self.source.by_ref().take(READ_BYTES as u64).read_to_end(&mut bytes)?;
        let pairs = bytes.as_chunks().0.iter().map(|pair| (self.unit)(*pair));
        let mut units: Vec<u16> = self.half.take().into_iter().chain(pairs).collect();
        let is_first_half = |unit: &u16| (0xd800..0xdc00).contains(unit);
        if bytes.len() == READ_BYTES && units.last().is_some_and(is_first_half) {
            self.half = units.pop();
        }
        let text: String = char::decode_utf16(units)
            .map(|letter| letter.unwrap_or(char::REPLACEMENT_CHARACTER))
            .filter(|letter| *letter != '\u{feff}')
            .collect();
        (self.text, self.given) = (text.into_bytes(), 0);
        Ok(())
    }
}

impl<R: Read> Read for Utf16<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.given == self.text.len() {
            self.decode()?;
        }
        let rest = &self.text[self.given..];
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        self.given += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(bytes: Vec<u8>) -> io::Result<String> {
        let (mut text, packed) = text_of(Box::new(io::Cursor::new(bytes)))?;
        assert!(packed);
        let mut all = String::new();
        text.read_to_string(&mut all).map(|_| all)
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(text.as_bytes()).unwrap();
        packer.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
    }

    #[test]
    fn packed_texts_are_read_to_their_end_also_in_several_parts() {
        let line = "step 1 is done\n".repeat(3000);
        for pack in [gzip, zstd] {
            assert_eq!(read([pack(&line), pack("the end\n")].concat()).unwrap(), format!("{line}the end\n"));
        }
        // `printf 'a rank died\n' | xz`
        let hexadecimal = "fd377a585a000004e6d6b4460200210116000000742fe5a301000b612072616e6b20646965640a00\
                           f6341780127336ba0001240ca618d8d81fb6f37d010000000004595a";
        let digits: String = hexadecimal.split_whitespace().collect();
        let xz: Vec<u8> = (0..digits.len() / 2)
            .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap())
            .collect();
        assert_eq!(read(xz.clone()).unwrap(), "a rank died\n");
        assert!(read(xz[..20].to_vec()).is_err(), "torn");
    }

    #[test]
    fn utf_16_of_both_orders_is_read_with_letters_of_two_units() {
        let text = format!("{}\u{1f525} disk full\n", "x".repeat(READ_BYTES / 2 - 2));
        for (mark, order) in
            [([0xff, 0xfe], u16::to_le_bytes as fn(u16) -> [u8; 2]), ([0xfe, 0xff], u16::to_be_bytes)]
        {
            let units = text.encode_utf16().flat_map(order);
            assert_eq!(read(mark.into_iter().chain(units).collect()).unwrap(), text);
        }
    }

    #[test]
    fn a_text_too_large_for_its_file_ends_with_an_error() {
        let mut text =
            Limited { text: Box::new(io::repeat(b'x')), written: 0, read: Rc::new(Cell::new(1 << 20)) };
        let mut piece = vec![0; 1 << 20];
        let ended = std::iter::repeat_with(|| text.read(&mut piece)).find(Result::is_err);
        assert_eq!(ended.unwrap().unwrap_err().kind(), ErrorKind::InvalidData);
        assert!(text.written <= MIN_EXPANDED_BYTES + (2 << 20));
    }
}
