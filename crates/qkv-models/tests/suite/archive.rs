//! Archives as `torch.save` writes them, for tests of this crate and the seeds of its fuzz targets.

/// An archive without compression.
pub fn zip(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in files {
        let (place, size) = (bytes.len() as u32, data.len() as u32);
        let sizes = [0, size, size].map(u32::to_le_bytes).concat();
        let names = [name.len() as u16, 0].map(u16::to_le_bytes).concat();
        bytes.extend([&b"PK\x03\x04"[..], &[0; 10], &sizes, &names, name.as_bytes(), data].concat());
        let entry = [&b"PK\x01\x02"[..], &[0; 12], &sizes, &names, &[0; 10], &place.to_le_bytes(), name.as_bytes()];
        directory.extend(entry.concat());
    }
    let (place, count) = (bytes.len() as u32, (files.len() as u16).to_le_bytes());
    bytes.extend(&directory);
    let sizes = [directory.len() as u32, place].map(u32::to_le_bytes).concat();
    bytes.extend([&b"PK\x05\x06"[..], &[0; 4], &count, &count, &sizes, &[0; 2]].concat());
    bytes
}
