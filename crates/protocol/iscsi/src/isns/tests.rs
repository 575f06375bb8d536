use super::*;

fn entity(targets: usize) -> Entity {
    let portal = |at: &str, group| Portal { at: at.parse().unwrap(), group };
    let portals = vec![portal("192.0.2.1:3260", 1), portal("[2001:db8::2]:3261", 2)];
    let target = |n| Target { name: format!("iqn.2026-01.x:{n}"), portals: portals.clone() };
    Entity { id: "e".into(), targets: (0..targets).map(target).collect() }
}

/// Tags and values of a message, behind its header.
fn attributes(message: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut rest = &message[HEADER_LEN..];
    let mut all = Vec::new();
    while let Ok((head, after)) = Attribute::read_from_prefix(rest) {
        let (value, next) = after.split_at(head.length.get() as usize);
        all.push((head.tag.get(), value.to_vec()));
        rest = next;
    }
    assert!(rest.is_empty());
    all
}

fn answer(message: &[u8], payload: &[u8]) -> Vec<u8> {
    let (mut header, _) = Header::read_from_prefix(message).unwrap();
    header.function = U16::new(header.function.get() | function::ANSWER);
    header.flags = U16::new(0x4000 | flag::FIRST | flag::LAST);
    header.length = U16::new(payload.len() as u16);
    [header.as_bytes(), payload].concat()
}

/// RFC 4171 5.1, 5.6.5.1, 6.1.
#[test]
fn rfc_4171_a_registration_byte_by_byte() {
    let messages = entity(1).register(RegistrationMode::Replace, 300, 7);
    assert_eq!(messages.len(), 1);
    let (header, payload) = messages[0].split_at(HEADER_LEN);
    assert_eq!(header[..4], [0, 1, 0, 1]);
    assert_eq!(usize::from(header[4]) << 8 | usize::from(header[5]), payload.len());
    assert_eq!(header[6..], [0x9c, 0, 0, 7, 0, 0], "from a client, replace, last and first");
    let name = b"iqn.2026-01.x:0\0".to_vec();
    let v4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1].to_vec();
    let v6 = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2].to_vec();
    let (at, at6) = (vec![0, 0, 0x0c, 0xbc], vec![0, 0, 0x0c, 0xbd]);
    let expected = [
        (32, name.clone()),
        (1, b"e\0\0\0".to_vec()),
        (0, vec![]),
        (1, b"e\0\0\0".to_vec()),
        (2, vec![0, 0, 0, 2]),
        (6, vec![0, 0, 1, 44]),
        (16, v4.clone()),
        (17, at.clone()),
        (16, v6.clone()),
        (17, at6.clone()),
        (32, name.clone()),
        (33, vec![0, 0, 0, 1]),
        (48, name.clone()),
        (49, v4),
        (50, at),
        (51, vec![0, 0, 0, 1]),
        (48, name),
        (49, v6),
        (50, at6),
        (51, vec![0, 0, 0, 2]),
    ];
    assert_eq!(attributes(&messages[0]), expected);
    let again = entity(1).register(RegistrationMode::Refresh, 300, 7);
    assert_eq!(again[0][6], 0x8c, "nothing is replaced");
    assert!(entity(0).register(RegistrationMode::Replace, 300, 7).is_empty());
}

#[test]
fn rfc_4171_a_deregistration_byte_by_byte() {
    let message = Entity::deregister("e", "iqn.2026-01.x:0", 0xffff);
    assert_eq!(message[..4], [0, 1, 0, 4]);
    assert_eq!(message[6..HEADER_LEN], [0x8c, 0, 0xff, 0xff, 0, 0]);
    let name = b"iqn.2026-01.x:0\0".to_vec();
    assert_eq!(attributes(&message), [(32, name), (0, vec![]), (1, b"e\0\0\0".to_vec())]);
}

#[test]
fn many_targets_are_several_messages_and_only_the_first_replaces() {
    let all = entity(4096);
    let messages = all.register(RegistrationMode::Replace, 300, 0xfffe);
    assert!(messages.len() > 10);
    let mut names = Vec::new();
    for (n, message) in messages.iter().enumerate() {
        assert!(message.len() < MAX_PAYLOAD);
        assert_eq!(message[6] & 0x10 != 0, n == 0);
        let transaction = 0xfffe_u16.wrapping_add(n as u16);
        assert_eq!(message[8..10], transaction.to_be_bytes());
        let found = attributes(message);
        assert_eq!(found[..3], attributes(&messages[0])[..3], "the same key");
        let own = found[3..].iter().filter(|(tag, _)| *tag == tag::ISCSI_NAME);
        names.extend(own.map(|(_, name)| name.clone()));
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 4096, "each once");
}

#[test]
fn rfc_4171_5_4_response_statuses() {
    let asked = &entity(1).register(RegistrationMode::Replace, 300, 7)[0];
    let read = |bytes: &[u8]| {
        let mut answer = ResponseAssembler::awaiting(asked).unwrap();
        let (header, payload) = bytes.split_first_chunk().unwrap();
        let (length, last) = answer.part(header)?;
        assert!(last && length == payload.len());
        answer.add(payload);
        answer.outcome()
    };
    let good = [&[0; 4][..], &[0, 0, 0, 1, 0, 0, 0, 4], b"e\0\0\0", &[0; 8]].concat();
    assert_eq!(read(&answer(asked, &good)), Ok(None));
    let with_period = [&good[..], &[0, 0, 0, 6, 0, 0, 0, 4, 0, 0, 2, 88]].concat();
    assert_eq!(read(&answer(asked, &with_period)), Ok(Some(600)));
    assert_eq!(read(&answer(asked, &[0, 0, 0, 8])), Err(ResponseError::Refused(8)));
    assert!(ResponseError::Refused(8).to_string().contains("source unauthorized"));
    assert!(ResponseError::Refused(99).to_string().contains("99"));
    for bad in [&[][..], &[0; 3], &[0, 0, 0, 0, 0], &good[..good.len() - 1]] {
        assert_eq!(read(&answer(asked, bad)), Err(ResponseError::Malformed));
    }
    let long = [&[0; 4][..], &[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xfc]].concat();
    assert_eq!(read(&answer(asked, &long)), Err(ResponseError::Malformed));
    for (at, value, why) in [
        (1, 2, ResponseError::NotIsns),
        (2, 0, ResponseError::WrongTransaction),
        (3, 4, ResponseError::WrongTransaction),
        (9, 8, ResponseError::WrongTransaction),
        (11, 1, ResponseError::WrongTransaction),
    ] {
        let mut other = answer(asked, &good);
        other[at] = value;
        assert_eq!(read(&other), Err(why), "byte {at}");
    }
}

#[test]
fn answers_in_parts_are_bounded() {
    let asked = &entity(1).register(RegistrationMode::Refresh, 300, 7)[0];
    let mut answer_to = ResponseAssembler::awaiting(asked).unwrap();
    let mut header: [u8; HEADER_LEN] = answer(asked, &[0; 4])[..HEADER_LEN].try_into().unwrap();
    header[6] = 0x44;
    (header[4], header[5]) = (0xff, 0xfc);
    let mut parts = 0_u16;
    let refused = loop {
        header[10..].copy_from_slice(&parts.to_be_bytes());
        match answer_to.part(&header) {
            Ok((length, last)) => {
                assert!(!last);
                answer_to.add(&vec![0; length]);
            }
            Err(why) => break why,
        }
        header[6] = 0x40;
        parts += 1;
    };
    assert_eq!(refused, ResponseError::Malformed);
    assert!(usize::from(parts) <= MAX_RESPONSE / 0xfffc);
}
