use super::blocks::{self, BLOCK_BYTES, PART_BLOCKS, Target};
use super::*;
use std::os::unix::fs::FileExt;

fn data(folder: &Path) -> Data {
    Data {
        image: folder.join("sessions.img"),
        at: folder.to_owned(),
        mib: 8,
    }
}

#[test]
fn an_image_is_made_once_and_has_one_user() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = data(folder.path());
    let Ok(image) = data.open(Some((1000, 1000))) else {
        assert!(mkfs().is_none(), "{:?}", data.open(None));
        return;
    };
    assert!(
        data.lacks(Path::new("/"), true)
            .iter()
            .all(|(what, _)| what.contains("loop"))
    );
    let lacks = data.lacks(Path::new("/"), false);
    let in_use = lacks.iter().find(|(what, _)| what.contains("in use"));
    assert!(in_use.is_some(), "{lacks:?}");
    assert_eq!(
        data.mark().expect("no mark").map(|mark| mark.run),
        Some(0),
        "it is there"
    );
    let first = blocks::hashes(&image).expect("its hashes");
    drop(image);
    let again = data.open(None).expect("it is free");
    assert_eq!(
        blocks::hashes(&again).expect("its hashes"),
        first,
        "and not made again"
    );
    assert!(!data.beside("new").exists());
}

#[test]
fn what_is_no_image_of_that_size_is_told_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = data(folder.path());
    fs::write(&data.image, vec![0; 1 << 20]).expect("written");
    let why = data.open(None).expect_err("another size").to_string();
    assert!(why.ends_with("it has 1 MiB and not 8, as data_mib says"), "{why}");
    File::create(&data.image)
        .and_then(|file| file.set_len(data.bytes()))
        .expect("made");
    let why = data.open(None).expect_err("empty").to_string();
    assert!(why.ends_with("it has no ext4 file system"), "{why}");
    let nowhere = Data {
        at: folder.path().join("none"),
        image: folder.path().join("none/sessions.img"),
        ..data.clone()
    };
    let lacks = nowhere.lacks(Path::new("/"), false);
    assert!(
        lacks.iter().any(|(what, _)| what.starts_with("data_at: "))
            && lacks.iter().any(|(what, _)| what.starts_with("data: ")),
        "{lacks:?}"
    );
    let huge = Data {
        mib: u32::MAX,
        image: folder.path().join("huge.img"),
        ..data
    };
    let why = huge.open(None).expect_err("no disk has that").to_string();
    assert!(why.contains("no room for an image"), "{why}");
}

#[test]
fn of_two_images_only_the_blocks_that_differ_travel() {
    const BLOCKS: usize = 16;
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(folder.path().join(name))
            .expect("made");
        file.set_len((BLOCKS * BLOCK_BYTES) as u64).expect("sized");
        file
    };
    let (ours, theirs) = (file("ours"), file("theirs"));
    let put = |file: &File, block: usize, byte: u8| {
        let bytes = vec![byte; BLOCK_BYTES];
        file.write_all_at(&bytes, (block * BLOCK_BYTES) as u64)
            .expect("written");
    };
    // One that both have, one that differs, one that only we have, one that only they have, and zeros that were written.
    for (block, byte) in [(0, 1), (3, 2), (7, 3), (9, 0)] {
        put(&ours, block, byte);
    }
    for (block, byte) in [(0, 1), (3, 9), (12, 4)] {
        put(&theirs, block, byte);
    }
    let theirs = Image { file: theirs };
    let mut known = blocks::hashes(&theirs).expect("their hashes");
    let target = Target::new(theirs).expect("sized");
    let source = blocks::Source::new(ours, device::Figures::none(), folder_of(folder.path()));
    let mut sent = Vec::new();
    let mut each = |block: u64, bytes: &[u8]| {
        sent.push(block);
        target.write(block, bytes)
    };
    let bytes = source.differing(&mut known, &mut each).expect("read");
    assert_eq!(bytes, 3 * BLOCK_BYTES as u64);
    assert_eq!(
        source.differing(&mut known, &mut each).expect("read"),
        0,
        "no news"
    );
    assert_eq!(sent, [3, 7, 12]);
    assert!(target.write(BLOCKS as u64, &vec![0; BLOCK_BYTES]).is_err());
    assert!(target.write(0, &[0]).is_err());
    target.sync().expect("on disk");
    let same = target.end();
    assert_eq!(blocks::hashes(&same).expect("hashes"), known);
}

#[test]
fn a_large_image_is_looked_at_in_parts() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("large");
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .expect("made");
    let blocks = 2 * PART_BLOCKS + 16;
    file.set_len((blocks * BLOCK_BYTES) as u64).expect("sized");
    // At the edges of parts.
    let written = [0, PART_BLOCKS - 1, PART_BLOCKS, 2 * PART_BLOCKS, blocks - 1];
    for block in written {
        let at = (block * BLOCK_BYTES) as u64;
        file.write_all_at(&[block as u8 | 1], at).expect("written");
    }
    let ours = file.try_clone().expect("a descriptor");
    let image = Image { file };
    let known = blocks::hashes(&image).expect("its hashes");
    assert_eq!(known.len(), blocks);
    let something = known.iter().enumerate().filter(|(_, hash)| **hash != 0);
    assert_eq!(something.map(|(block, _)| block).collect::<Vec<_>>(), written);
    assert!(blocks::hashes_from(&image, blocks).expect("none").is_empty());
    assert_eq!(blocks::hashes_from(&image, blocks - 3).expect("three").len(), 3);
    // Nothing is known of the second part.
    let source = blocks::Source::new(ours, device::Figures::none(), folder_of(folder.path()));
    let mut of_part = vec![0; PART_BLOCKS];
    let mut sent = Vec::new();
    let mut each = |block: u64, _: &[u8]| {
        sent.push(block as usize);
        Ok::<_, crate::guard::GuardError>(())
    };
    let bytes = source.differing_from(PART_BLOCKS, &mut of_part, &mut each);
    assert_eq!(bytes.expect("read"), BLOCK_BYTES as u64);
    assert_eq!(sent, [PART_BLOCKS]);
    assert_eq!(of_part, known[PART_BLOCKS..2 * PART_BLOCKS]);
}

fn folder_of(path: &Path) -> OwnedFd {
    File::open(path).expect("it is there").into()
}
