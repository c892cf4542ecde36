// The agent packages that this broker can send: the packages in its own directory and the uploaded ones.
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import {
  fingerprintOf,
  type PackageSignature,
  type SignedPackage,
  signatureFileOf,
  signatureFileSchema,
} from '../../shared/agent-package-signature.ts';
import type { Api, Reply } from '../../shared/api/route-table.ts';
import { iso } from '../../shared/clock.ts';

type Arch = 'x64' | 'arm64';
type Kind = SignedPackage['kind'];

/** Version, architecture and kind of a package, as stated in its file name. */
export interface PackageName {
  version: string;
  arch: Arch;
  kind: Kind;
}

export interface AgentPackage extends PackageName {
  file: string;
  path: string;
  size: number;
  /** SHA-256 of the package, in hexadecimal. */
  sha256: string;
  /** Signature of the package; undefined if there is none, or if it is for another package. */
  signature: PackageSignature | undefined;
  /** Fingerprint of the key that made `signature`; null without a signature. */
  signed_by: string | null;
  uploaded: boolean;
  /** Time of the file's last change, in milliseconds since 1970. */
  created_at: number;
}

/** Maximum size of a signature file in bytes. */
const maxSignatureBytes = 64 * 1024;
const tarName = /^farhand-agent-(\d[\w.+-]{0,63})-linux-(x64|arm64)\.tar\.gz$/;
const debName = /^farhand-agent_(\d[\w.+~-]{0,63})_(amd64|arm64)\.deb$/;
const archOfDebian: Readonly<Record<string, Arch>> = { amd64: 'x64', arm64: 'arm64' };

/** Parses the name of a package's file; undefined for any other file. */
export function parsePackageName(file: string): PackageName | undefined {
  const [, version, arch] = tarName.exec(file) ?? [];
  if (version && arch) return { version, arch: arch as Arch, kind: 'tar.gz' };
  const [, debian, debianArch = ''] = debName.exec(file) ?? [];
  const known = archOfDebian[debianArch];
  return debian && known ? { version: debian, arch: known, kind: 'deb' } : undefined;
}

/** Parses the text of a signature file. Returns undefined if the text is not valid. */
export function parseSignatureFile(text: string) {
  try {
    return signatureFileSchema.safeParse(JSON.parse(text)).data;
  } catch {
    return undefined;
  }
}

/**
 * Returns the agent packages of a directory. `files` are the lines of SHA256SUMS: names of files with their SHA-256.
 * Names that are no agent packages are left out.
 */
export function packagesIn(directory: string, files: Iterable<readonly [string, string]>): AgentPackage[] {
  return [...files].flatMap(([file, sha256]) => packageAt(directory, file, sha256, false) ?? []);
}

/**
 * Returns the uploaded packages of a directory. A package that is still being uploaded has no signature file, and is
 * left out.
 */
export function uploadedPackages(directory: string): AgentPackage[] {
  if (!existsSync(directory)) return [];
  return readdirSync(directory).flatMap((file) => packageAt(directory, file, undefined, true) ?? []);
}

/**
 * Describes the agent package in a file; undefined if there is none. If `sha256` is undefined, the hash is read from
 * the signature file, and a package without a valid signature file is left out.
 */
function packageAt(
  directory: string,
  file: string,
  sha256: string | undefined,
  uploaded: boolean,
): AgentPackage | undefined {
  const name = parsePackageName(file);
  if (!name) return undefined;
  const path = join(directory, file);
  // The file may have been removed since the directory was read.
  const stat = statSync(path, { throwIfNoEntry: false });
  if (!stat) return undefined;
  const signed = signatureOf(path);
  const fits = signed && signed.size === stat.size && (sha256 ?? signed.sha256) === signed.sha256;
  const hash = sha256 ?? (fits ? signed.sha256 : undefined);
  if (hash === undefined) return undefined;
  const signature = fits && isSigned(name, signed) ? signed : undefined;
  return {
    ...{ ...name, file, path, size: stat.size, sha256: hash, signature, uploaded },
    ...{ signed_by: signature ? fingerprintOf(signature.public_key) : null, created_at: stat.mtimeMs },
  };
}

/** True if the signature is for the package with this name. */
export const isSigned = (name: PackageName, signed: SignedPackage): boolean =>
  name.version === signed.version && name.arch === signed.arch && name.kind === signed.kind;

function signatureOf(path: string) {
  const file = signatureFileOf(path);
  const stat = statSync(file, { throwIfNoEntry: false });
  if (!stat || stat.size > maxSignatureBytes) return undefined;
  return parseSignatureFile(readFileSync(file, 'utf8'));
}

/** Converts a package to the JSON of the REST API. */
export function toJson(one: AgentPackage): Reply<Api['packages']['upload']> {
  const { file, version, arch, kind, size, sha256, signed_by, uploaded, created_at } = one;
  return { id: file, version, arch, kind, size, sha256, signed_by, uploaded, created_at: iso(created_at) };
}

/** A snapshot of the agent packages that this broker can send. */
export type Catalog = readonly AgentPackage[];
