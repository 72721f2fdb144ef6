-- Text to lexemes, of chunks and of questions, in any language.
--
-- The parser of full text cuts words where letters end, and asks the database's locale what a letter is.
-- Under C, and so under the builtin C.UTF-8, every character beyond ASCII is one: „Haus“ is a word with
-- quotation marks inside. And it looks for words where none are marked: a Chinese sentence is one word under
-- every locale. Both are settled here before it reads the text, in the same way under every locale.

create function text_search_config(language text)
returns regconfig
language sql
immutable
parallel safe
begin atomic
    select case language
        when 'ar' then 'pg_catalog.arabic'
        when 'ca' then 'pg_catalog.catalan'
        when 'da' then 'pg_catalog.danish'
        when 'de' then 'pg_catalog.german'
        when 'el' then 'pg_catalog.greek'
        when 'en' then 'pg_catalog.english'
        when 'es' then 'pg_catalog.spanish'
        when 'eu' then 'pg_catalog.basque'
        when 'fi' then 'pg_catalog.finnish'
        when 'fr' then 'pg_catalog.french'
        when 'ga' then 'pg_catalog.irish'
        when 'hi' then 'pg_catalog.hindi'
        when 'hu' then 'pg_catalog.hungarian'
        when 'hy' then 'pg_catalog.armenian'
        when 'id' then 'pg_catalog.indonesian'
        when 'it' then 'pg_catalog.italian'
        when 'lt' then 'pg_catalog.lithuanian'
        when 'ne' then 'pg_catalog.nepali'
        when 'nl' then 'pg_catalog.dutch'
        when 'no' then 'pg_catalog.norwegian'
        when 'pt' then 'pg_catalog.portuguese'
        when 'ro' then 'pg_catalog.romanian'
        when 'ru' then 'pg_catalog.russian'
        when 'sr' then 'pg_catalog.serbian'
        when 'sv' then 'pg_catalog.swedish'
        when 'ta' then 'pg_catalog.tamil'
        when 'tr' then 'pg_catalog.turkish'
        when 'yi' then 'pg_catalog.yiddish'
        else 'pg_catalog.simple'
    end::regconfig;
end;

comment on function text_search_config(text) is 'The text-search configuration for an ISO 639-1 language code; simple for every other value and for null';

create function unspaced_letters()
returns text
language sql
immutable
parallel safe
begin atomic
    -- Han, kana, bopomofo and Hangul; then Thai, Lao, Myanmar, Khmer, and the Tai scripts.
    select '\u1100-\u11FF\u2E80-\u2FDF\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303C\u3041-\u309A\u309D-\u309F'
        || '\u30A1-\u30FA\u30FC-\u30FF\u3105-\u312F\u3131-\u318E\u31A0-\u31BF\u31F0-\u31FF\u3400-\u4DBF\u4E00-\u9FFF'
        || '\uA960-\uA97C\uAC00-\uD7FB\uF900-\uFAFF\U0001AFF0-\U0001B16F\U00020000-\U0003FFFD'
        || '\u0E01-\u0E3A\u0E40-\u0E4E\u0E81-\u0ECE\u0EDC-\u0EDF\u1000-\u103F\u1050-\u108F\u109A-\u109D'
        || '\uA9E0-\uA9EF\uA9FA-\uA9FE\uAA60-\uAA7F\u1780-\u17D3\u17DC\u17DD\u1950-\u1974\u1980-\u19C9'
        || '\u1A20-\u1A7C\uAA80-\uAADD';
end;

comment on function unspaced_letters() is 'The letters and marks, for a bracket expression, of scripts where no space tells where a word begins; Hangul too, where a space tells little: endings are written onto the word';

create function unspaced_unit()
returns text
language sql
immutable
parallel safe
begin atomic
    -- A vowel that is written before its consonant but spoken after it, a letter, and the marks on it. No text
    -- has more than four of those; an unbounded number would make lexemes that are too long to be stored.
    select '[\u0E40-\u0E44\u0EC0-\u0EC4]?'
        || '[^ \u0E31\u0E34-\u0E3A\u0E47-\u0E4E\u0EB1\u0EB4-\u0EBC\u0EC8-\u0ECE\u102B-\u103E\u1056-\u1059\u105E-\u1060'
        || '\u1062-\u1064\u1067-\u106D\u1071-\u1074\u1082-\u108D\u108F\u109A-\u109D\u17B4-\u17D3\u17DD\u1A55-\u1A7C]'
        || '[\u0E31\u0E34-\u0E3A\u0E47-\u0E4E\u0EB1\u0EB4-\u0EBC\u0EC8-\u0ECE\u102B-\u103E\u1056-\u1059\u105E-\u1060'
        || '\u1062-\u1064\u1067-\u106D\u1071-\u1074\u1082-\u108D\u108F\u109A-\u109D\u17B4-\u17D3\u17DD\u1A55-\u1A7C]{0,6}'
        || '|.';
end;

comment on function unspaced_unit() is 'A regular expression for what pairs are made of: one letter of the unspaced scripts with its marks';

-- Pairs of neighbours are what words are made of in these scripts. On sections of the FastAPI manual in
-- Chinese, Japanese and Korean, asked for by 1,900 headings (nDCG@10 of BM25, k1 1.2, b 0.75): pairs .496, .435,
-- .441; triples .374, .399, .363; single letters .479, .389, .411; the parser's words .112, .075, .273. Singles
-- and pairs together gain .02 and double the index. Thai, with 44 headings of the React manual: pairs of
-- letters with their marks .598, of bare characters .574.
create function unspaced_vector(content text, asked boolean)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    -- With no delimiter, each character is a unit: three times as fast, and all that East Asia needs.
    with unit as (
        select
            entry.unit,
            lag(entry.unit, 1, ' ') over text_order as before,
            lead(entry.unit, 1, ' ') over text_order as after,
            entry.place
        from (
            select regexp_replace(unspaced_vector.content, '[^' || unspaced_letters() || ']+', ' ', 'g') as content
        ) as run
        cross join lateral (
            select run.content ~ '[\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u1950-\u19FF\u1A20-\u1AAF\uA9E0-\uA9FF\uAA60-\uAADF]'
        ) as script (has_marks)
        cross join lateral string_to_table(
            case
                when script.has_marks then regexp_replace(run.content, unspaced_unit(), '\&|', 'g')
                else run.content
            end,
            case when script.has_marks then '|' end
        ) with ordinality as entry (unit, place)
        window text_order as (order by entry.place)
    )

    select coalesce(cast(string_agg('''' || lexeme.lexeme || ''':' || unit.place, ' ') as tsvector), cast('' as tsvector))
    from unit
    cross join lateral (
        select case
            when unit.after not in (' ', '') then unit.unit || unit.after
            when not unspaced_vector.asked or unit.before = ' ' then unit.unit
        end as lexeme
    ) as lexeme
    where unit.unit not in (' ', '')
        and lexeme.lexeme is not null;
end;

comment on function unspaced_vector(text, boolean) is 'Each two neighbouring letters of the unspaced scripts as a lexeme, at its place in the text. The last letter of a run is a lexeme too, so that every letter begins exactly one; in a question it is one only where the run has no other';

create function prepared_vector(configuration regconfig, content text, asked boolean)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    -- What no one sees goes: soft hyphens, joiners, directions, variants of form. Then what no word contains
    -- becomes a space; in turn: Latin to Syriac; India; Thailand to Mongolia; general punctuation, symbols and
    -- East Asia; private use, where fonts keep their bullets; forms of presentation; pictures.
    with separated as materialized (
        select regexp_replace(
            regexp_replace(
                prepared_vector.content,
                '[\u00AD\u061C\u180B-\u180F\u200B-\u200F\u202A-\u202E\u2060-\u206F\uFE00-\uFE0F\uFEFF\uFFF9-\uFFFB'
                || '\U000E0001-\U000E01EF]',
                '',
                'g'
            ),
            '[\u0080-\u00A9\u00AB\u00AC\u00AE-\u00B1\u00B4\u00B6-\u00B8\u00BB-\u00BF\u00D7\u00F7'
            || '\u02C2-\u02C5\u02D2-\u02DF\u037E\u0384\u0385\u0387\u03F6\u0482\u055A-\u055F\u0589-\u058F'
            || '\u05BE\u05C0\u05C3\u05C6\u05F3\u05F4\u0606-\u060F\u061B\u061D-\u061F\u066A-\u066D\u06D4\u06DE\u06E9'
            || '\u06FD\u06FE\u0700-\u070D'
            || '\u0964\u0965\u0970\u09F2\u09F3\u09FA\u09FB\u09FD\u0A76\u0AF0\u0AF1\u0B70\u0BF3-\u0BFA\u0C77\u0C7F'
            || '\u0C84\u0D4F\u0D79\u0DF4'
            || '\u0E2F\u0E3F\u0E46\u0E4F\u0E5A\u0E5B\u0EAF\u0EC6\u0F01-\u0F17\u0F1A-\u0F1F\u0F34\u0F36\u0F38'
            || '\u0F3A-\u0F3D\u0F85\u0FBE-\u0FC5\u0FC7-\u0FDA\u104A-\u104F\u109E\u109F\u10FB\u1360-\u1368'
            || '\u1390-\u1399\u1400\u166D\u166E\u1680\u169B\u169C\u16EB-\u16ED\u1735\u1736\u17D4-\u17DB\u1800-\u180A'
            || '\u1FBD\u1FBF-\u1FC1\u1FCD-\u1FCF\u1FDD-\u1FDF\u1FED-\u1FEF\u1FFD-\u200A\u2010-\u2029\u202F-\u205F'
            || '\u207A-\u207E\u208A-\u208E\u20A0-\u20CF\u2100-\u2109\u2114-\u2118\u211E-\u2125\u2127\u2129'
            || '\u213A\u213B\u2140-\u2144\u214A-\u214D\u2150-\u215F\u2189-\u2BFF\u2E00-\u2E7F\u2FF0-\u3004'
            || '\u3008-\u3020\u3030\u3036\u3037\u303D-\u303F\u309B\u309C\u30A0\u30FB\u3190-\u319F\u31C0-\u31EF'
            || '\u4DC0-\u4DFF'
            || '\uE000-\uF8FF'
            || '\uFBB2-\uFBC2\uFD3E-\uFD4F\uFDFC-\uFDFF\uFE10-\uFE19\uFE30-\uFE6B\uFF01-\uFF0F\uFF1A-\uFF20'
            || '\uFF3B-\uFF40\uFF5B-\uFF65\uFFE0-\uFFEE\uFFFC\uFFFD'
            || '\U0001F000-\U0001FBCA]+',
            ' ',
            'g'
        ) as content
    ),

    -- Letters in full or half width, ligatures, accents in characters of their own: one form for all of them.
    composed as materialized (
        select case
            when separated.content is nfkc normalized then separated.content
            else normalize(separated.content, nfkc)
        end as content
        from separated
    )

    select case
        when composed.content !~ ('[' || unspaced_letters() || ']')
            then to_tsvector(prepared_vector.configuration, composed.content)
        else
            to_tsvector(
                prepared_vector.configuration,
                regexp_replace(composed.content, '[' || unspaced_letters() || ']+', ' ', 'g')
            )
            || unspaced_vector(composed.content, prepared_vector.asked)
    end
    from composed;
end;

comment on function prepared_vector(regconfig, text, boolean) is 'Lexemes of a text that the parser cannot take as it is, those of spaced scripts first; asked: of a question';

create function text_vector(language text, content text, asked boolean)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    -- ASCII, and of Latin, Greek, Cyrillic, Hebrew, Arabic and Vietnamese the letters that are composed. The
    -- preparation adds a third to what the parser costs, the test nothing that can be measured.
    select case
        when content !~ (
            '[^\x01-\x7F\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u0131\u0134-\u013E\u0141-\u0148\u014A-\u017E'
            || '\u0386\u0388-\u038A\u038E-\u03A1\u03A3-\u03CE\u0400-\u0481\u048A-\u052F\u05D0-\u05EA'
            || '\u0620-\u064A\u0660-\u0669\u066E\u066F\u0671-\u0674\u0679-\u06D3\u1EA0-\u1EFF]'
        ) then to_tsvector(text_search_config(language), content)
        else prepared_vector(text_search_config(language), content, asked)
    end;
end;

comment on function text_vector(text, text, boolean) is 'Lexemes of a text in the configuration of its language (ISO 639-1); asked: of a question';

create function search_vector(language text, content text)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    select text_vector(language, content, false);
end;

comment on function search_vector(text, text) is 'What rag_chunks.tsv holds: the lexemes of a text in the configuration of its language (ISO 639-1; null: unknown). Raises for no text of up to 32 KiB';

create function question_lexemes(language text, question text)
returns table (lexeme text, weight integer, place integer)
language sql
immutable
parallel safe
rows 10
begin atomic
    -- 64 distinct lexemes are more than a question has; a pasted page is cut to its first ones.
    select
        entry.lexeme,
        cardinality(entry.positions),
        cast(row_number() over (order by entry.positions[1], entry.lexeme) as integer) as place
    from unnest(text_vector(question_lexemes.language, question_lexemes.question, true)) as entry
    order by place
    limit 64;
end;

comment on function question_lexemes(text, text) is 'The distinct lexemes of a question as search_vector makes them, first ones first, at most 64; those of scripts without spaces come after the others. weight: occurrences; place: 1, 2, …';

create function lexeme_total(document tsvector)
returns integer
language sql
immutable
parallel safe
begin atomic
    select cast(coalesce(sum(cardinality(entry.positions)), 0) as integer)
    from unnest(document) as entry;
end;

comment on function lexeme_total(tsvector) is 'Occurrences of all lexemes of a tsvector, the document length of BM25; a lexeme counts up to 255 times';

create function lexeme_query(lexeme text)
returns tsquery
language sql
immutable
parallel safe
begin atomic
    -- A single letter of the unspaced scripts asks for all pairs that begin with it, which is wherever it stands.
    select cast(
        '''' || replace(replace(lexeme, '\', '\\'), '''', '''''') || ''''
        || case
            when lexeme ~ ('^[' || unspaced_letters() || ']') and lexeme ~ ('^(?:' || unspaced_unit() || ')$') then ':*'
            else ''
        end
        as tsquery
    );
end;

comment on function lexeme_query(text) is 'The query for exactly this lexeme, whatever characters it has; for a single letter of the unspaced scripts, the query for every pair that begins with it';
